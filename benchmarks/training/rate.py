"""Rates from the log of a part, and FLOPs from the shape of a model."""

import statistics
from typing import Any, NamedTuple

from reluformer.config.recipe import Recipe
from reluformer.model.config import ModelConfig
from reluformer.train.data import TrainingData


class Line(NamedTuple):
    """A line of a part's log: when it was read, and the target tokens so far."""

    seconds: float
    tokens: int


class Rate(NamedTuple):
    """The steady rate of a part."""

    tokens_per_second: float
    """Median over the intervals that count."""
    kept: int
    """Number of intervals that count."""
    seconds: float
    """Total duration of those intervals."""
    speeds: list[float]
    """Target tokens per second of every interval but the first."""


def rate_of(lines: list[Line]) -> Rate | None:
    """The steady rate; None before the second interval has ended."""
    pairs = list(zip(lines, lines[1:], strict=False))[1:]
    if not pairs:
        return None
    seconds = [after.seconds - before.seconds for before, after in pairs]
    tokens = [after.tokens - before.tokens for before, after in pairs]
    speeds = [count / taken for count, taken in zip(tokens, seconds, strict=True)]
    kept = [index for index, speed in enumerate(speeds) if speed >= max(speeds) / 2]
    median = statistics.median(speeds[index] for index in kept)
    return Rate(median, len(kept), sum(seconds[index] for index in kept), speeds)


def forward_flops(config: ModelConfig, source: Any, target: Any) -> Any:
    """FLOPs of the forward for examples with lengths `source` and `target` [n]."""
    w, f = config.width, config.slots
    k = config.key_value_heads * config.head_width
    encoder = 2 * source * (2 * w * w + 2 * w * k + 2 * w * f) + 4 * source**2 * w
    decoder = 2 * target * (4 * w * w + 2 * w * k + 2 * w * f) + 4 * source * w * k
    decoder = decoder + 2 * target**2 * w + 4 * target * source * w
    layers = config.encoder_layers * encoder + config.decoder_layers * decoder
    return layers + 2 * target * w * config.vocabulary


def describe(recipe: Recipe, data: TrainingData) -> dict[str, Any]:
    """Size and FLOPs of a training step of the recipe."""
    batches = data.train.batches(recipe)
    config = recipe.model_with(data.tokenizer.vocab_size)
    source, target = batches.source_lengths, batches.target_lengths
    per_step = recipe.train.accumulate * float(target.sum()) / len(batches.plan(0))
    flops = 3 * forward_flops(config, source.astype(float), target.astype(float)).sum()
    return {
        "vocabulary": config.vocabulary,
        "examples": len(target),
        "target_tokens_per_step": round(per_step, 1),
        "rows_of_equal_tokens": max(1, round(per_step / float(target.mean()))),
        "flops_per_target_token": float(flops / target.sum()),
    }
