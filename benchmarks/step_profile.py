"""Where a training step goes: milliseconds of a step, and GPU time by kernel.

    python -m benchmarks.step_profile --data data/europarl-sent --out profile.json
    python -m benchmarks.step_profile --data data/europarl-sent \\
        --set model.attention.kind=softmax --out profile-softmax.json

Trains the recipe `sentence` as `reluformer train` does, with its compiled layers and CUDA graphs,
but without reports. Steps are timed after all shapes of batches have been captured.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from reluformer.config.recipe import load_recipe
from reluformer.console import guarded
from reluformer.errors import UserError
from reluformer.files import write_json
from reluformer.info import commit, info
from reluformer.train import loop, train

TIMED, PROFILED = 60, 20
NAME_LENGTH = 160


class Profiled(Exception):
    """The measurement is complete."""


class Watch:
    """Counts the steps of a training, times some of them and profiles others."""

    def __init__(self, untimed: int, timed: int, profiled: int) -> None:
        self.begin = untimed
        self.end = untimed + timed
        self.last = self.end + profiled
        self.result: dict[str, Any] = {}
        self._clock = 0.0
        # The profiler counts CPU time where there is no GPU, as in tests.
        activity = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
        self._profiler = profile(activities=[activity])

    def advance(self, step: int) -> None:
        """Note the end of a step; called by the training loop."""
        if step in (self.begin, self.end, self.last) and torch.cuda.is_available():
            torch.cuda.synchronize()
        if step == self.begin:
            self._clock = time.perf_counter()
        if step == self.end:
            seconds = time.perf_counter() - self._clock
            self.result["step_ms"] = round(1e3 * seconds / (self.end - self.begin), 3)
            self._profiler.start()
        if step == self.last:
            self._profiler.stop()
            self.result["kernels"] = self._kernels()
            raise Profiled

    def _kernels(self) -> list[dict[str, Any]]:
        """Kernels, the longest first: milliseconds and launches in a step."""
        steps = self.last - self.end
        rows = []
        for event in self._profiler.key_averages():
            microseconds = getattr(event, "self_device_time_total", 0)
            microseconds = microseconds or event.self_cpu_time_total
            row = {"ms": round(microseconds / steps / 1e3, 4), "launches": event.count / steps}
            rows.append({"name": event.key[:NAME_LENGTH], **row})
        return sorted(rows, key=lambda row: -row["ms"])


def measure(assignments: list[str], watch: Watch) -> dict[str, Any]:
    """Train with some settings until the watch has its result."""
    recipe = load_recipe("sentence", [*assignments, "train.bleu_every=null"])
    if recipe.train.steps < watch.last:
        raise UserError(f"train.steps must be at least {watch.last}, got {recipe.train.steps}")

    class Loop(loop._Loop):
        def run_steps(self) -> Any:
            self.progress.advance = watch.advance  # type: ignore[method-assign]
            return super().run_steps()

        def _is_reported(self, step: int) -> bool:
            return False

    original = loop._Loop
    loop._Loop = Loop  # type: ignore[misc]
    try:
        with tempfile.TemporaryDirectory() as folder:
            train(recipe, Path(folder) / "run", quiet=True)
    except Profiled:
        pass
    finally:
        loop._Loop = original  # type: ignore[misc]
    return watch.result


def main() -> None:
    """Measure, write JSON and print the longest kernels."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", required=True, help="prepared folder of europarl-sent")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", dest="settings")
    parser.add_argument("--untimed", type=int, default=250, help="steps before the first timed one")
    options = parser.parse_args()
    watch = Watch(options.untimed, TIMED, PROFILED)
    result = measure([f"data.source={options.data}", *options.settings], watch)
    head = {"commit": commit(), "machine": info(), "settings": options.settings}
    write_json(options.out, {**head, **result})
    print(f"{result['step_ms']:.2f} ms a step")
    for row in result["kernels"][:40]:
        print(f"{row['ms']:8.3f} ms {row['launches']:7.1f} x  {row['name'][:120]}")


if __name__ == "__main__":
    guarded(main)()
