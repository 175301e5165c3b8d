"""Several commands at once on one device, until the clock says stop."""

import os
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_POLL = 0.1
# A longer time between two polls means that the runner was suspended.
_LONGEST_POLL = 1.0
# Seconds without CPU time (below 1 %) after which a command has stalled, and how often a stalled
# command is started again. Compilations of torch that run side by side can wait for each other
# forever (https://github.com/pytorch/pytorch/pull/189290).
_STALL = 180.0
_RESTARTS = 2
# Environment variable with the process of the queue.
_RUNNER = "RELUFORMER_STUDY_RUNNER"


@dataclass
class Clock:
    """Time that a command has taken over all its starts."""

    seconds: float = 0.0
    device_seconds: float = 0.0
    """Seconds divided among the commands that ran at the same time."""


@dataclass
class _Job:
    process: "subprocess.Popen[bytes]"
    log_begin: int
    cpu_seconds: float = 0.0
    idle_seconds: float = 0.0
    """Time since the command or its children last used the CPU."""

    def count(self, seconds: float) -> None:
        """Add to the idle time, which starts again whenever the command uses the CPU."""
        before = self.idle_seconds
        self.idle_seconds += seconds
        if int(self.idle_seconds) == int(before):
            # It looks once a second.
            return
        used = cpu_seconds(self.process.pid)
        # The sum falls when a child ends that nobody waits for.
        if used is None or abs(used - self.cpu_seconds) > _STALL / 100:
            self.cpu_seconds, self.idle_seconds = used or 0.0, 0.0


@dataclass
class JobQueue:
    """Runs commands, at most `jobs` at a time, until `end` on the monotonic clock."""

    jobs: int
    end: float
    logs: Path
    """Folder of one log file a command; a log grows over several starts."""
    report: Callable[[str], None]
    clocks: dict[str, Clock] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    """Exit status and last log line of each command that failed before the clock ended."""
    _live: dict[str, _Job] = field(default_factory=dict)
    _stalls: Counter[str] = field(default_factory=Counter)

    def collect_clocks(self) -> dict[str, Clock]:
        """Remove and return the clocks of commands that no longer run."""
        return {name: self.clocks.pop(name) for name in list(self.clocks) if name not in self._live}

    def run(self, ready: Callable[[], Mapping[str, list[str]]]) -> list[str]:
        """Run commands in order; return the names of those that succeeded.

        Commands that still run at the end are killed, and go on when they are started again. So are
        commands that have stalled.

        Args:
            ready: Returns the commands that can run now. It is called at the start and whenever a
                command has ended; commands that were started before are skipped.
        """
        waiting: dict[str, list[str]] = {}
        live = self._live
        started: set[str] = set()
        succeeded: list[str] = []
        is_current = False
        last = time.monotonic()
        try:
            while time.monotonic() < self.end:
                if not is_current:
                    waiting = {n: command for n, command in ready().items() if n not in started}
                    is_current = True
                while waiting and len(live) < self.jobs:
                    name = next(iter(waiting))
                    live[name] = self._start(name, waiting.pop(name))
                    started.add(name)
                if not live:
                    break
                time.sleep(_POLL)
                now = time.monotonic()
                elapsed = min(now - last, _LONGEST_POLL)
                last = now
                self._count(live, elapsed)
                for job in live.values():
                    job.count(elapsed)
                for name in [name for name, job in live.items() if job.process.poll() is not None]:
                    is_current = False
                    if self._ended(name, live.pop(name)):
                        succeeded.append(name)
                for name in [name for name, job in live.items() if job.idle_seconds > _STALL]:
                    is_current = False
                    if self._stalled(name, live.pop(name)):
                        started.remove(name)
        finally:
            for name in list(live):
                process = live.pop(name).process
                process.kill()
                process.wait()
                self.report(f"{name}: stopped; the next call goes on")
        return succeeded

    def _start(self, name: str, command: list[str]) -> _Job:
        self.logs.mkdir(parents=True, exist_ok=True)
        with open(self.logs / f"{name}.log", "ab") as log:
            begin = log.tell()
            process = subprocess.Popen(command, stdout=log, stderr=log, env=_environment())
        return _Job(process, begin)

    def _count(self, live: Mapping[str, _Job], seconds: float) -> None:
        for name in live:
            clock = self.clocks.setdefault(name, Clock())
            clock.seconds += seconds
            clock.device_seconds += seconds / len(live)

    def _ended(self, name: str, job: _Job) -> bool:
        seconds = self.clocks.setdefault(name, Clock()).seconds
        if job.process.returncode == 0:
            self.report(f"{name}: done after {seconds:.0f} s")
            return True
        line = last_line(self.logs / f"{name}.log", job.log_begin)
        self.failed[name] = f"exit status {job.process.returncode}: {line}"
        self.report(f"{name}: failed, {self.failed[name]}")
        return False

    def _stalled(self, name: str, job: _Job) -> bool:
        """Kill a command that has stalled; return whether it may start again."""
        job.process.kill()
        job.process.wait()
        self._stalls[name] += 1
        reason = f"stalled: no CPU time for {_STALL:.0f} s"
        if self._stalls[name] > _RESTARTS:
            self.failed[name] = reason
            self.report(f"{name}: failed, {reason}")
            return False
        self.report(f"{name}: {reason}; started again")
        return True


def cpu_seconds(process: int) -> float | None:
    """CPU time of a process and its children, such as workers that compile for it.

    None if the process is suspended or waits for a disk, or where the system does not tell.
    """
    try:
        fields = (
            Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        )
    except OSError:
        return None
    if fields[0] in "DTt":
        return None
    # Its own user and system time, and those of children that have ended.
    ticks = sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK") + sum(cpu_seconds(c) or 0.0 for c in _children(process))


def _children(process: int) -> list[int]:
    """The live children of a process; none where the system does not tell."""
    children: list[int] = []
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            children += map(int, task.read_text(encoding="utf-8").split())
    return children


def last_line(log: Path, begin: int) -> str:
    """Last line with text that a log has from byte `begin` on."""
    text = log.read_bytes()[begin:].decode("utf-8", errors="replace")
    return next((line.strip() for line in reversed(text.split("\n")) if line.strip()), "empty log")


def start_mps() -> None:
    """Start CUDA's multi-process service where it exists.

    Kernels of several processes then run at the same time instead of taking turns.
    """
    subprocess.run(["sh", "-c", "nvidia-cuda-mps-control -d >/dev/null 2>&1"], check=False)


def end_with_runner() -> None:
    """End this process, a command of a queue, when the process of the queue has ended.

    A killed runner cannot stop its commands, which would go on beside those of the next call.
    """
    runner = int(os.environ.get(_RUNNER, 0))

    def watch() -> None:
        while os.getppid() == runner:
            time.sleep(_POLL)
        os._exit(1)

    if runner:
        threading.Thread(target=watch, daemon=True).start()


def _environment() -> dict[str, str]:
    """One thread a process: processes side by side would otherwise contend for all cores."""
    own = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", _RUNNER: str(os.getpid())}
    return {**os.environ, **own}
