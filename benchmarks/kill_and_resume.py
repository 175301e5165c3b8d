"""Kill a training run again and again with SIGKILL; what it ends with must not differ by a bit.

    python benchmarks/kill_and_resume.py
    python benchmarks/kill_and_resume.py --kills 40 --recipe tiny

Trains a recipe once undisturbed and once under fire: a third of the kills come at any moment since
the start of the process, a third while it learns, a third while it writes a checkpoint. Prints what
each kill hit and whether losses and weights are the same in the end; exits with 1 if they are not.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


class Kill(NamedTuple):
    """One kill and what it left."""

    aim: str
    seconds: float
    step: int
    """Last step that the process logged; 0 if it did not get that far."""
    checkpoint: int
    """Step of the newest complete checkpoint."""
    litter: int
    """Unfinished files and folders that it left."""


class Run:
    """A training run in a folder."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        self.folder = folder
        train = [sys.executable, "-m", "reluformer", "train", "--quiet"]
        self._command = [*train, "--out", str(folder), *arguments]

    def start(self) -> "subprocess.Popen[bytes]":
        """Start or resume it."""
        return subprocess.Popen(self._command, env=ENVIRONMENT)

    def finish(self) -> None:
        """Start or resume it and wait for its end."""
        if self.start().wait() != 0:
            raise SystemExit(f"the run in {self.folder} failed")

    def records(self) -> list[dict[str, Any]]:
        """Its metrics without those that depend on the clock; a line cut short is left out."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.is_file() else []
        records = [json.loads(line) for line in lines]
        for record in records:
            record.pop("tokens_per_second", None)
        return records

    def starts(self) -> int:
        """How often it has begun to learn."""
        path = self.folder / "run.json"
        return len(json.loads(path.read_text())["starts"]) if path.is_file() else 0

    def checkpoint(self) -> int:
        """Step of its newest complete checkpoint."""
        names = [path.name for path in (self.folder / "checkpoints").glob("step-????????")]
        return max((int(name.removeprefix("step-")) for name in names), default=0)

    def writing(self) -> bool:
        """Whether a checkpoint is being written."""
        folder = str(self.folder / "checkpoints")
        return os.path.isdir(folder) and any(".partial" in name for name in os.listdir(folder))


class Pace(NamedTuple):
    """Seconds that an undisturbed run takes."""

    startup: float
    """Until it learns."""
    checkpoint: float
    """From one checkpoint to the next."""


def undisturbed(run: Run, checkpoints: int) -> Pace:
    """Take the run from its start to its end."""
    began = time.monotonic()
    process = run.start()
    _wait(process, lambda: run.starts() > 0)
    startup = time.monotonic() - began
    if process.wait() != 0:
        raise SystemExit(f"the run in {run.folder} failed")
    return Pace(startup, (time.monotonic() - began - startup) / checkpoints)


def kill(run: Run, aim: str, rng: random.Random, pace: Pace) -> Kill:
    """Start the run and kill it."""
    began, starts, previous = time.monotonic(), run.starts(), run.checkpoint()
    process = run.start()
    if aim == "any moment":
        moment = rng.uniform(0, pace.startup + 2 * pace.checkpoint)
        _wait(process, lambda: time.monotonic() - began > moment)
    elif aim == "learning":
        _wait(process, lambda: run.starts() > starts)
        first, delay = time.monotonic(), rng.uniform(0, 2 * pace.checkpoint)
        _wait(process, lambda: time.monotonic() - first > delay)
    else:
        # Litter of an earlier kill is swept before learning begins.
        _wait(process, lambda: run.starts() > starts)
        _wait(process, run.writing, sleep=0)
    process.kill()
    process.wait()
    logged = [record["step"] for record in run.records()]
    litter = len(list(run.folder.rglob("*.partial")))
    learnt = run.starts() > starts
    assert run.checkpoint() >= previous
    step = max(logged, default=0) if learnt else 0
    return Kill(aim, time.monotonic() - began, step, run.checkpoint(), litter)


def _wait(
    process: "subprocess.Popen[bytes]", ready: Callable[[], bool], sleep: float = 0.001
) -> None:
    while not ready():
        if process.poll() is not None:
            raise SystemExit("the run ended before all kills were made; give it more steps")
        time.sleep(sleep)


def differences(first: Run, second: Run) -> list[str]:
    """What differs between two finished runs, in words."""
    from safetensors.torch import load_file

    found = []
    if first.records() != second.records():
        found.append("metrics.jsonl")
    for name in ("model.safetensors", "config.json", "tokenizer.json", "recipe.yaml"):
        paths = [run.folder / "model" / name for run in (first, second)]
        if paths[0].read_bytes() != paths[1].read_bytes():
            found.append(f"model/{name}")
    weights = [load_file(run.folder / "model" / "model.safetensors") for run in (first, second)]
    found += [name for name in weights[0] if not weights[0][name].equal(weights[1][name])]
    if second.writing() or list(second.folder.rglob("*.partial")):
        found.append("unfinished files")
    return found


def main() -> None:
    """Run both runs and compare them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--recipe", default="toy-reverse")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    steps = options.every * (2 * options.kills + 5)
    overrides = [f"train.steps={steps}", f"train.checkpoint_every={options.every}"]
    overrides += ["train.log_every=1", "train.dev_every=50", "train.device=cpu", "train.threads=1"]
    with tempfile.TemporaryDirectory() as folder:
        arguments = [options.recipe, *(f"--set={override}" for override in overrides)]
        whole, killed = (Run(Path(folder, name), arguments) for name in ("whole", "killed"))
        pace = undisturbed(whole, steps // options.every)
        rng = random.Random(options.seed)
        aims = ["any moment", "learning", "writing a checkpoint"]
        print(f"{steps} steps, a checkpoint every {options.every}, {options.kills} kills")
        print(f"{'kill':>4}  {'aimed at':<20} {'after':>7} {'step':>5} {'kept':>5} {'litter':>6}")
        for number in range(options.kills):
            hit = kill(killed, aims[number % len(aims)], rng, pace)
            print(
                f"{number + 1:>4}  {hit.aim:<20} {hit.seconds:>6.2f}s {hit.step:>5} "
                f"{hit.checkpoint:>5} {hit.litter:>6}",
                flush=True,
            )
        killed.output_transform()
        wrong = differences(whole, killed)
        print(f"differs: {', '.join(wrong)}" if wrong else "losses and weights are bit-identical")
        sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
