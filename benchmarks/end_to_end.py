"""Whole training steps on the fused kernels, on the reference, and with softmax through SDPA.

    python -m benchmarks.end_to_end --out end-to-end.json
    TRITON_INTERPRET=1 python -m benchmarks.end_to_end --quick --out end-to-end.json

The recipe `document` without dropout, with the learner, objective and CUDA graphs of
`reluformer.train`. Runs of one length share initial weights and batches: random tokens with Zipf
frequencies, repeated by the target. All rows are full, but the model receives lengths as in
training; softmax then needs a mask, which excludes the fastest kernels of SDPA. Runs named
"no lengths" do not pass them.

apart     largest difference of a run's losses from those of the reference in bfloat16
rounding  the same for the reference in float32 (with TF32, as in training): what bfloat16 does to
          the rest of the model. The reference always attends in float32, so kernels that round
          weights to bfloat16 may be about as far apart as this, not much farther
parts     number of micro-batches of a step that does not fit into memory
"""

import argparse
import dataclasses
import gc
import math
import time
from collections import namedtuple
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reluformer.bench.timing import in_short
from reluformer.config.recipe import Recipe, load_recipe
from reluformer.config.train import TrainConfig
from reluformer.data.batches import Batch
from reluformer.data.tokenizer import BOS, EOS
from reluformer.files import write_json
from reluformer.info import commit, info
from reluformer.model import ReLUFormer
from reluformer.model.losses import translation_loss
from reluformer.processes import Processes, processes
from reluformer.train.cuda_graph import Graphs
from reluformer.train.initialise import autocast, torch_settings
from reluformer.train.objective import Objective, inputs
from reluformer.train.schedules import learning_rate, step_seed
from reluformer.train.trainer_state import TrainerState, should_compile, should_use_graphs

RECIPE = "document"
UNTIMED, CALIBRATION_TOKENS = 3, 4096
REFERENCE, YARDSTICK, UNTOLD = "relu reference", "relu reference, float32", ", no lengths"
# Largest length of the float32 reference, which is slow.
YARDSTICK_UP_TO = 1024
SDPA = ("model.attention.kind=softmax", "model.attention.impl=sdpa")
RUNS = {
    "relu triton": ("model.attention.impl=triton",),
    "relu triton" + UNTOLD: ("model.attention.impl=triton",),
    "softmax SDPA": SDPA,
    "softmax SDPA" + UNTOLD: SDPA,
    REFERENCE: ("model.attention.impl=reference",),
    YARDSTICK: ("model.attention.impl=reference", "train.precision=float32"),
}
Step = Callable[[list[Batch], int], Tensor]
Plan = namedtuple("Plan", "lengths tokens steps vocabulary overrides")
GPU = Plan((512, 1024, 2048, 4096), 16_384, 20, 30_000, ("train.precision=bfloat16",))
# Tests this script on a CPU; Triton's interpreter cannot multiply bfloat16.
TINY = ("train.device=cpu", "train.precision=float32", "model.width=32", "model.heads=2",
        "model.slots=32", "model.encoder_layers=1", "model.decoder_layers=1")  # fmt: skip
TOY = Plan((16,), 32, UNTIMED + 1, 50, TINY)


def batches(plan: Plan, length: int) -> list[Batch]:
    """Batches of all steps; the target equals the source."""
    rows, frequencies = plan.tokens // length, 1 / np.arange(3, plan.vocabulary)
    size, shares = (plan.steps, rows, length), frequencies / frequencies.sum()
    drawn = np.random.default_rng(length).choice(len(shares), size, p=shares)
    source = torch.from_numpy(drawn + 3)
    source[..., -1] = EOS
    shifted = source.roll(1, dims=-1)
    shifted[..., 0] = BOS
    full = torch.full((rows,), length)
    return [
        Batch(ids, full, before, ids, full, np.arange(rows), rows * length, position=(0, 0))
        for ids, before in zip(source, shifted, strict=True)
    ]


def rows_of(batch: Batch, rows: slice) -> Batch:
    """A batch with some rows of another."""
    part = batch.with_tensors([each[rows] for each in batch.tensors()])
    return dataclasses.replace(part, target_tokens=part.source.numel())


def start(
    plan: Plan, recipe: Recipe, device: torch.device, length: int
) -> tuple[list[Batch], dict[str, Tensor]]:
    """Batches on the device and initial weights on the host, so that peak memory is the run's."""
    data = [batch.to(device) for batch in batches(plan, length)]
    torch.manual_seed(length)
    model = ReLUFormer(recipe.model_with(plan.vocabulary)).to(device)
    model.calibrate([inputs(rows_of(data[0], slice(max(1, CALIBRATION_TOKENS // length))))])
    return data, {name: each.cpu() for name, each in model.state_dict().items()}


def order(lengths: Sequence[int]) -> list[tuple[int, str]]:
    """Length and name of all runs; the slow references come last."""
    return [
        (length, name)
        for slow in (False, True)
        for length in lengths
        for name in RUNS
        if (name in (REFERENCE, YARDSTICK)) == slow
        and (name != YARDSTICK or length <= YARDSTICK_UP_TO)
    ]


def stepper(config: TrainConfig, model: ReLUFormer, group: Processes, told: bool) -> Step:
    """A function that takes one step like the training loop and returns the loss []."""
    learner, device = TrainerState(model, config, group), group.device
    parallel = learner.parallel
    if not told:
        drop = {"source_lengths": None, "target_lengths": None}
        parallel = dataclasses.replace(parallel, forward=lambda **given: model(**(given | drop)))
    compiled = should_compile(config, device)
    loss = torch.compile(translation_loss, dynamic=True) if compiled else translation_loss
    objective = Objective(config, model.config, group, autocast(config, device), loss)
    if should_use_graphs(config, group):
        add = objective.add_gradients
        graphs = Graphs(lambda batch, numbers: add(parallel, batch, numbers))
        objective = dataclasses.replace(objective, replay=graphs)

    def take(parts: list[Batch], step: int) -> Tensor:
        torch.manual_seed(step_seed(config.seed, step, group.rank))
        losses = objective.backward(parallel, parts, step)
        learner.update(step, learning_rate(config, step))
        return losses[0]

    return take


def train(
    parts: int, recipe: Recipe, plan: Plan, data: list[Batch], start: dict[str, Any], told: bool
) -> dict[str, Any]:
    """Losses, speed and peak memory of one run."""
    with processes(recipe.train.device) as group, torch_settings(recipe.train, group.device):
        cuda = group.device.type == "cuda"
        model = ReLUFormer(recipe.model_with(plan.vocabulary)).to(group.device)
        # Softmax attention has no gamma and no threshold.
        model.load_state_dict(start, strict=recipe.model.attention.kind == "relu")
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        take = stepper(recipe.train, model, group, told)
        size, found, clock = math.ceil(len(data[0].source) / parts), [], []
        for step, batch in enumerate(data, 1):
            cuts = range(0, len(batch.source), size)
            found.append(take([rows_of(batch, slice(at, at + size)) for at in cuts], step))
            if step in (UNTIMED, len(data)):
                # Synchronises the device.
                found[-1].item()
                clock.append(time.perf_counter())
    return {
        "tokens_per_second": plan.tokens * (len(data) - UNTIMED) / (clock[1] - clock[0]),
        **({"peak_gib": torch.cuda.max_memory_allocated() / 2**30} if cuda else {}),
        "parts": parts,
        "losses": [each.item() for each in found],
    }


def attempt(parts: int, *given: Any) -> dict[str, Any]:
    """Result of `train`, with more parts when memory is short, or the error."""
    try:
        return train(parts, *given)
    except torch.OutOfMemoryError:
        retry = parts < 4
    except Exception as problem:
        return {"failed": in_short(problem)}
    finally:
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
    return attempt(2 * parts, *given) if retry else {"failed": "out of memory"}


def compare(rows: list[dict[str, Any]]) -> None:
    """Add differences of losses and ratios of speed to the rows of one length."""
    found = {row["run"]: row for row in rows if "losses" in row}
    for name, row in found.items() if REFERENCE in found else ():
        reference = found[REFERENCE]
        row["x_reference"] = row["tokens_per_second"] / reference["tokens_per_second"]
        if name.startswith("relu"):
            pairs = zip(row["losses"], reference["losses"], strict=True)
            row["rounding" if name == YARDSTICK else "apart"] = max(abs(a - b) for a, b in pairs)


def table(rows: list[dict[str, Any]]) -> str:
    """The results as a text table."""
    forms = {"tokens_per_second": ",.0f", "x_reference": ".2f", "peak_gib": ".1f", "parts": "",
             "apart": ".1e", "rounding": ".1e"}  # fmt: skip
    lines = [f"length {'run':24}" + "".join(f"{name:>18}" for name in forms)]
    for row in rows:
        cells = [
            f"{format(row[name], form) if name in row else '':>18}" for name, form in forms.items()
        ]
        lines.append(f"{row['length']:6} {row['run']:24}{row.get('failed', ''.join(cells))[:130]}")
    return "\n".join(lines)


def main() -> None:
    """Train all runs within the time limit, write JSON and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument(
        "--seconds", type=float, default=80.0, help="time after which no run starts"
    )
    parser.add_argument("--compile", action="store_true", help="compile layers; takes minutes")
    parser.add_argument("--lengths", type=int, nargs="+", help="default: 512 to 4096")
    parser.add_argument("--quick", action="store_true", help="toy sizes on a CPU")
    arguments = parser.parse_args()
    begin = time.monotonic()
    plan, device = (TOY, torch.device("cpu")) if arguments.quick else (GPU, torch.device("cuda"))
    # A short warm-up, so that some steps have the full learning rate.
    settings = ["model.dropout=0.0", "train.warmup=10", *plan.overrides]
    settings.append(f"train.compile={str(arguments.compile).lower()}")
    recipes = {name: load_recipe(RECIPE, [*settings, *own]) for name, own in RUNS.items()}
    report: dict[str, Any] = {"commit": commit(), "machine": info(), "settings": settings}
    report["rows"] = rows = []
    begin_with = cache(partial(start, plan, recipes[REFERENCE], device))
    for length, name in order(arguments.lengths or plan.lengths):
        row: dict[str, Any] = {"failed": "no time left"}
        if time.monotonic() - begin < arguments.seconds:
            data, weights = begin_with(length)
            row = attempt(1, recipes[name], plan, data, weights, not name.endswith(UNTOLD))
        rows.append({"length": length, "run": name, **row})
        compare([each for each in rows if each["length"] == length])
        write_json(arguments.out, {**report, "seconds": time.monotonic() - begin})
        print(f"{time.monotonic() - begin:5.0f} s: {length}, {name}", flush=True)
    print(table(sorted(rows, key=lambda row: row["length"])))


if __name__ == "__main__":
    main()
