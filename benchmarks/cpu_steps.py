"""CPU seconds of a training step: torch's settings, those of `reluformer train`, and bfloat16.

    python -m benchmarks.cpu_steps --out steps.json
    python -m benchmarks.cpu_steps --recipe tiny --vocabulary 1000 --out tiny.json

All are timed in turn on one thread, with random tokens. Time is the CPU time of the process, so
that waiting for a core does not count. A round takes the smallest of a few steps, because the first
one after a change of settings takes new memory, and a ratio is the median over the rounds.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.whole_steps import interleaved
from reluformer.config.recipe import Recipe, load_recipe
from reluformer.console import guarded
from reluformer.data.batches import Batch
from reluformer.files import write_json
from reluformer.info import commit, info
from reluformer.model import ReLUFormer
from reluformer.processes import Processes
from reluformer.train.initialise import autocast
from reluformer.train.objective import Objective
from reluformer.train.schedules import learning_rate
from reluformer.train.torch_settings import torch_settings
from reluformer.train.trainer_state import TrainerState

CPU = torch.device("cpu")
LENGTH = 25
"""Tokens of a sentence."""
STEPS = 4
"""Steps of a round."""


def random_batch(tokens: int, vocabulary: int) -> Batch:
    """Sentences of equal length, with ids above those of padding and marks."""
    rows = max(tokens // LENGTH, 1)
    source, target_in, target_out = torch.randint(4, vocabulary, (3, rows, LENGTH))
    lengths = torch.full((rows,), LENGTH)
    return Batch(
        source, lengths, target_in, target_out, lengths,
        examples=torch.arange(rows).numpy(), target_tokens=rows * LENGTH, position=(0, 1),
    )  # fmt: skip


def clock(recipe: Recipe, vocabulary: int, *, is_default: bool) -> Callable[[], float]:
    """A function that trains a few steps and returns the CPU milliseconds of the fastest.

    Args:
        recipe: Settings of model and training.
        vocabulary: Number of subwords.
        is_default: Whether torch's own settings stay in place of those of `reluformer train`.
    """
    torch.manual_seed(1)
    config, alone = recipe.train, Processes(0, 1, CPU)
    model = ReLUFormer(recipe.model_with(vocabulary)).train()
    trainer = TrainerState(model, config, alone)
    objective = Objective(config, model.config, alone, autocast(config, CPU))
    batch = random_batch(config.batch_tokens, vocabulary)
    steps = iter(range(1, config.steps + 1))

    def step() -> float:
        number, begin = next(steps), time.process_time()
        objective.backward(trainer.parallel, [batch], number)
        trainer.update(number, learning_rate(config, number))
        return 1e3 * (time.process_time() - begin)

    def fastest() -> float:
        with nullcontext() if is_default else torch_settings(config, CPU):
            return min(step() for _ in range(STEPS))

    return fastest


def measure(recipe: Recipe, vocabulary: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each way to compute the products."""
    narrow = replace(recipe, train=replace(recipe.train, precision="bfloat16"))
    clocks = {
        "float32, torch's default": clock(recipe, vocabulary, is_default=True),
        "float32, as reluformer train": clock(recipe, vocabulary, is_default=False),
        "bfloat16": clock(narrow, vocabulary, is_default=False),
    }
    interleaved(clocks, 1)
    times = interleaved(clocks, rounds)
    default = times["float32, torch's default"]
    return [
        {
            "products": name,
            "ms": statistics.median(taken),
            "times_as_fast": statistics.median(
                d / t for d, t in zip(default, taken, strict=True)
            ),
        }
        for name, taken in times.items()
    ]  # fmt: skip


def main() -> None:
    """Measure, print the table and write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--recipe", default="small")
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", dest="settings")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    recipe = load_recipe(options.recipe, [*options.settings, "train.threads=1"])
    rows = measure(recipe, options.vocabulary, options.rounds)
    for row in rows:
        print(f"{row['products']:30} {row['ms']:8.1f} ms  {row['times_as_fast']:.2f} x")
    head = {"commit": commit(), "machine": info(), "recipe": options.recipe}
    write_json(options.out, {**head, "settings": options.settings, "rows": rows})


if __name__ == "__main__":
    guarded(main)()
