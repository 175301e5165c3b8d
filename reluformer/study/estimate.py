"""Tokens, minutes and memory that a study needs, said before it starts."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from reluformer.config.recipe import Recipe
from reluformer.info import machine
from reluformer.study.cells import Cell, Outcome
from reluformer.train.requirements import estimate as estimate_training

# Effective training speed per streaming multiprocessor and per CPU core, in FLOP/s. Measured: the
# sentence recipe trains at 632 k target tokens/s on an H200 (132 multiprocessors) and at 213 to 257
# on a core of an AMD EPYC, where small models mostly wait for the host, 16 ms a layer and step.
_HOPPER_SM = 1.06e12
_OLDER_SM = 0.4e12
_CPU_CORE = 6e10
_CPU_LAYER_SECONDS = 0.016
# Seconds to start a process and to load or compile before the first step, and to translate after
# the last.
_OVERHEAD = {"cuda": 60.0, "cpu": 6.0}
_OTHER_SECONDS = {"theory": 5.0, "family": 60.0, "extrapolation": 60.0, "context": 90.0}
# Share of a batch that is no padding.
_FILL = 0.85


class Needs(NamedTuple):
    """Estimated needs of some cells."""

    cells: int
    tokens: int
    """Target tokens of all trainings."""
    minutes: float
    gigabytes: float
    """Device memory of the cells that run at the same time."""

    def __str__(self) -> str:
        return (
            f"{self.cells} cells to run, {self.tokens / 1e6:,.1f} M target tokens to train, about "
            f"{_duration(self.minutes)} and {self.gigabytes:.1f} GB"
        )


def _duration(minutes: float) -> str:
    """A time in a unit that reads well."""
    if minutes < 90:
        return f"{max(minutes, 0.1):.1f} minutes"
    return f"{minutes / 60:.1f} hours" if minutes < 2880 else f"{minutes / 1440:,.0f} days"


def estimate(
    cells: Sequence[tuple[Cell, Recipe | None]],
    finished: Sequence[Outcome],
    jobs: int,
    vocabulary: Callable[[Recipe], int],
) -> Needs:
    """Needs of the cells that are left.

    Args:
        cells: Cells that have not ended, with the recipes of trainings.
        finished: Outcomes of this study; the time that a cell took on this machine replaces the
            model of it for cells that differ in the seed or the rate.
        jobs: Cells that run at the same time.
        vocabulary: Size of the vocabulary of a recipe's data.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    devices = machine()["devices"]
    here = [o for o in finished if o.detail.get("machine", {}).get("devices") == devices]
    tokens, seconds, shared, sizes = 0, 0.0, 0.0, [0.0]
    for cell, recipe in cells:
        if recipe is None:
            seconds += _OTHER_SECONDS[cell.work]
            continue
        size = vocabulary(recipe)
        needs = estimate_training(recipe, size)
        count = round(_FILL * needs.tokens)
        tokens += count
        alike = _alike(cell, here)
        sizes.append(needs.memory_bytes / 1e9)
        if alike is None:
            seconds += _OVERHEAD[device] + training_seconds(recipe, size, device)
        elif device == "cpu":
            seconds += alike.seconds * count / alike.values["tokens"]
        else:
            shared += alike.device_seconds * count / alike.values["tokens"]
    # A GPU divides its speed among cells; CPU cores work side by side.
    side_by_side = min(jobs, os.cpu_count() or 1) if device == "cpu" else min(jobs, 2)
    together = sum(sorted(sizes)[-jobs:])
    return Needs(len(cells), tokens, (seconds / side_by_side + shared) / 60, together)


def training_seconds(recipe: Recipe, vocabulary: int, device: str) -> float:
    """Seconds that a training takes on this machine, roughly; with one thread on a CPU."""
    train, model = recipe.train, recipe.model
    passes = train.steps * train.accumulate
    flops = _FILL * passes * train.batch_tokens * flops_per_token(recipe, vocabulary)
    seconds = flops / device_speed(device)
    if device == "cpu":
        seconds += passes * (model.encoder_layers + model.decoder_layers) * _CPU_LAYER_SECONDS
    return seconds


def flops_per_token(recipe: Recipe, vocabulary: int) -> float:
    """Floating-point operations of training per target token: 6 per weight, and attention."""
    model = recipe.model
    attention = 4 * model.width**2
    memory = 2 * model.width * model.slots
    encoder = model.encoder_layers * (attention + memory)
    decoder = model.decoder_layers * (2 * attention + memory)
    scores = (model.encoder_layers + 2 * model.decoder_layers) * 2 * recipe.data.max_length
    return 6.0 * (encoder + decoder + model.width * (vocabulary + scores))


def device_speed(device: str) -> float:
    """Effective FLOP/s of training on this machine, roughly; of one core on a CPU."""
    if device == "cpu":
        return _CPU_CORE
    properties = torch.cuda.get_device_properties(0)
    per_sm = _HOPPER_SM if properties.major >= 9 else _OLDER_SM
    return float(properties.multi_processor_count * per_sm)


def _alike(cell: Cell, finished: Sequence[Outcome]) -> Outcome | None:
    """An ended cell that differs in the seed or the rate only, and whose time is known."""
    for outcome in finished:
        is_timed = outcome.device_seconds > 0 and outcome.values.get("tokens")
        if is_timed and _size(outcome.labels) == _size(cell.labels):
            return outcome
    return None


def _size(labels: Mapping[str, Any]) -> dict[str, Any]:
    """Labels that say how long a training takes."""
    return {name: value for name, value in labels.items() if name not in ("seed", "rate")}
