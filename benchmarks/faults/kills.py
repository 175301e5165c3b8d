"""Kills at random moments of a command."""

import random
import time
from typing import NamedTuple

from benchmarks.faults.jobs import COMPLETE, Command, Job, Train


class Killed(NamedTuple):
    """Result of all kills of one command."""

    command: str
    kills: int
    before: int
    """Kills after which the output was as before the start."""
    complete: int
    """Kills after which the output was the whole new one, or a newer checkpoint."""
    most_leftovers: int
    """Largest number of `.partial` files and folders after a kill."""
    leftovers: int
    """Number of them after the command has run to its end."""
    seconds: float
    """Duration of the command without a kill."""


def kill_repeatedly(job: Job, kills: int, seconds: float, rng: random.Random) -> Killed:
    """Kill a job `kills` times; every attempt that ends before its kill is repeated.

    Half of the kills come at any moment, half around the end, where files are put in place. The
    moments of a training run, which goes on where it was killed, are all alike.

    Args:
        job: The job.
        kills: Number of kills.
        seconds: Duration of the job; for a training run, of its start and two checkpoints.
        rng: Source of the moments.

    Raises:
        Broken: A kill left output that is neither old nor complete.
    """
    counts = {True: 0, False: 0}
    most = number = 0
    while sum(counts.values()) < kills:
        job.reset(number)
        around_the_end = number % 4 >= 2 and not isinstance(job, Train)
        number += 1
        moment = rng.uniform(0.9 if around_the_end else 0.0, 1.05) * seconds
        command = job.start()
        if _ends_before(command, job, moment):
            if command.status:
                raise SystemExit(f"{job.name} failed without a fault: {command.message()}")
            continue
        command.kill()
        counts[job.state() == COMPLETE] += 1
        most = max(most, job.leftovers())
    job.reset(0)
    job.finish()
    return Killed(job.name, kills, counts[False], counts[True], most, job.leftovers(), seconds)


def _ends_before(command: Command, job: Job, moment: float) -> bool:
    """Wait up to `moment` seconds, or until a training run has made its share of the steps."""
    if not isinstance(job, Train):
        return command.wait(moment)
    deadline, first = time.monotonic() + moment, job.newest()
    while time.monotonic() < deadline and job.newest() < first + job.share:
        if command.wait(0.002):
            return True
    return False
