"""Kill a training run repeatedly with SIGKILL; its result must be bit-identical to a whole run.

    python -m benchmarks.kill_and_resume
    python -m benchmarks.kill_and_resume --kills 40 --recipe tiny

Trains a recipe once without and once with kills. A third of the kills come at any moment after the
start of the process, a third during training steps, a third while a checkpoint is written. Prints
the state after each kill, and whether losses and weights are equal at the end. Exits with 1 if not.
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
    """One kill and the state after it."""

    aim: str
    seconds: float
    step: int
    """Last step that the process logged; 0 if it logged none."""
    checkpoint: int
    """Step of the newest complete checkpoint."""
    litter: int
    """Number of unfinished files and folders."""


class Run:
    """A training run in a folder."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        self.folder = folder
        train = [sys.executable, "-m", "reluformer", "train", "--quiet"]
        self._command = [*train, "--out", str(folder), *arguments]

    def start(self) -> "subprocess.Popen[bytes]":
        """Start or resume the run."""
        return subprocess.Popen(self._command, env=ENVIRONMENT)

    def finish(self) -> None:
        """Start or resume the run and wait for its end."""
        if self.start().wait() != 0:
            raise SystemExit(f"the run in {self.folder} failed")

    def records(self) -> list[dict[str, Any]]:
        """Metrics that do not depend on the clock, without an incomplete last line."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.is_file() else []
        records = [json.loads(line) for line in lines]
        for record in records:
            record.pop("tokens_per_second", None)
        return records

    def starts(self) -> int:
        """Number of starts that reached the training loop."""
        path = self.folder / "run.json"
        return len(json.loads(path.read_text())["starts"]) if path.is_file() else 0

    def checkpoint(self) -> int:
        """Step of the newest complete checkpoint."""
        names = [path.name for path in (self.folder / "checkpoints").glob("step-????????")]
        return max((int(name.removeprefix("step-")) for name in names), default=0)

    def writing(self) -> bool:
        """Whether a checkpoint is being written."""
        folder = str(self.folder / "checkpoints")
        return os.path.isdir(folder) and any(".partial" in name for name in os.listdir(folder))


class Pace(NamedTuple):
    """Durations of an undisturbed run, in seconds."""

    startup: float
    """From the start of the process to the first step."""
    checkpoint: float
    """From one checkpoint to the next."""


def undisturbed(run: Run, checkpoints: int) -> Pace:
    """Run without kills and measure its pace."""
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
    elif aim == "training step":
        _wait(process, lambda: run.starts() > starts)
        first, delay = time.monotonic(), rng.uniform(0, 2 * pace.checkpoint)
        _wait(process, lambda: time.monotonic() - first > delay)
    else:
        # Unfinished files of an earlier kill are removed before the first step.
        _wait(process, lambda: run.starts() > starts)
        _wait(process, run.writing, sleep=0)
    process.kill()
    process.wait()
    logged = [record["step"] for record in run.records()]
    litter = len(list(run.folder.rglob("*.partial")))
    has_trained = run.starts() > starts
    assert run.checkpoint() >= previous
    step = max(logged, default=0) if has_trained else 0
    return Kill(aim, time.monotonic() - began, step, run.checkpoint(), litter)


def _wait(
    process: "subprocess.Popen[bytes]", ready: Callable[[], bool], sleep: float = 0.001
) -> None:
    while not ready():
        if process.poll() is not None:
            raise SystemExit("the run ended before all kills were made; give it more steps")
        time.sleep(sleep)


def differences(first: Run, second: Run) -> list[str]:
    """Names of files and weights that differ between two finished runs."""
    from safetensors.torch import load_file

    different = []
    if first.records() != second.records():
        different.append("metrics.jsonl")
    for name in ("model.safetensors", "config.json", "tokenizer.json", "recipe.yaml"):
        paths = [run.folder / "model" / name for run in (first, second)]
        if paths[0].read_bytes() != paths[1].read_bytes():
            different.append(f"model/{name}")
    weights = [load_file(run.folder / "model" / "model.safetensors") for run in (first, second)]
    different += [name for name in weights[0] if not weights[0][name].equal(weights[1][name])]
    if second.writing() or list(second.folder.rglob("*.partial")):
        different.append("unfinished files")
    return different


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
        aims = ["any moment", "training step", "writing a checkpoint"]
        print(f"{steps} steps, a checkpoint every {options.every}, {options.kills} kills")
        print(f"{'kill':>4}  {'aimed at':<20} {'after':>7} {'step':>5} {'kept':>5} {'partial':>7}")
        for number in range(options.kills):
            hit = kill(killed, aims[number % len(aims)], rng, pace)
            print(
                f"{number + 1:>4}  {hit.aim:<20} {hit.seconds:>6.2f}s {hit.step:>5} "
                f"{hit.checkpoint:>5} {hit.litter:>7}",
                flush=True,
            )
        killed.finish()
        wrong = differences(whole, killed)
        print(f"differs: {', '.join(wrong)}" if wrong else "losses and weights are bit-identical")
        sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
