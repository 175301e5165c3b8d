"""Measures of one trained model on one batch: variance ratios, centralisation, row statistics.

Attention statistics are reported per layer and head. Padding never counts.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from reluformer.diagnostics import (
    BranchVariance,
    MemoryReport,
    anisotropy,
    branch_variances,
    evaluating,
    memory_reports,
    top_shares,
)
from reluformer.model.attention import MultiHeadAttention
from reluformer.model.base import Model
from reluformer.model.heads import split_heads
from reluformer.model.records import AttentionRecord
from reluformer.ops.stats import Stats, has_weight

PERCENTS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
"""Shares of the slots, in percent, at which the top-p % curve is evaluated."""


@dataclass(frozen=True)
class HeadMeasures:
    """Means over the query rows of one head."""

    row_sum: float
    """Sum of the weights before row normalisation."""
    entropy: float
    """Entropy of the row-normalised weights, in nats; 0 in a dead row."""
    zeros: float
    """Share of visible keys with weight exactly zero."""
    dead_rows: float
    """Share of rows that see keys and give all of them weight zero."""
    dead_slots: float
    """Share of the keys of an example that no query row gives any weight. Persistent slots are keys
    of every example."""
    max: float
    anisotropy: float
    """Mean pairwise cosine of the value vectors this head reads."""


@dataclass(frozen=True)
class AttentionMeasures:
    """One attention: a record per head, and the top-p % curve over all heads."""

    site: str
    layer: int
    heads: tuple[HeadMeasures, ...]
    top_share: tuple[float, ...]
    """Share of the weight on the top p % of the keys, for every p of `Inspection.percents`: the
    mean over rows with weight."""

    def mean(self, name: str) -> float:
        """Mean of a field of `HeadMeasures` over the heads."""
        values: list[float] = [getattr(head, name) for head in self.heads]
        return sum(values) / len(values)


@dataclass(frozen=True)
class MemoryMeasures:
    """One feed-forward memory."""

    name: str
    zeros: float
    dead_slots: float
    """Share of slots that no token of the batch reads."""
    entropy: float
    anisotropy: float
    """Mean pairwise cosine of the rows of V."""
    output_variance: float
    top_share: tuple[float, ...]


@dataclass(frozen=True)
class Inspection:
    """All measures of a model on one batch."""

    examples: int
    source_tokens: int
    target_tokens: int
    percents: tuple[float, ...]
    branches: tuple[BranchVariance, ...]
    attentions: tuple[AttentionMeasures, ...]
    memories: tuple[MemoryMeasures, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with five significant digits."""
        values = asdict(self)
        values["branches"] = [branch._asdict() for branch in self.branches]
        short: dict[str, Any] = rounded(values)
        return short


def inspect_model(
    model: Model, batch: Mapping[str, Tensor], percents: Sequence[float] = PERCENTS
) -> Inspection:
    """Measure every branch, attention and memory of a model.

    Args:
        model: An encoder-decoder; evaluated without dropout.
        batch: Keywords of the model's `forward`, with `source_lengths` and `target_lengths` [B].
        percents: Shares of the slots, in percent, for the top-p % curve.
    """
    values: dict[str, Tensor] = {}
    with _capture_values(model, values), evaluating(model):
        records = model(**batch, record="weights").records
    attentions = tuple(_attention(record, values, batch, percents) for record in records)
    return Inspection(
        examples=batch["source"].shape[0],
        source_tokens=int(batch["source_lengths"].sum()),
        target_tokens=int(batch["target_lengths"].sum()),
        percents=tuple(percents),
        branches=tuple(branch_variances(model, batch)),
        attentions=attentions,
        memories=_memories(model, batch, percents),
    )


def _attention(
    record: AttentionRecord,
    values: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    percents: Sequence[float],
) -> AttentionMeasures:
    stats, weights = record.stats, record.weights
    assert isinstance(stats, Stats) and weights is not None
    rows = (record.valid & (stats.visible > 0)).expand_as(stats.row_sum)  # [B, H, Tq]
    visible = stats.visible.expand_as(stats.row_sum)
    keys = _key_mask(record, batch, weights)  # [B, Tk]
    read = (weights.abs() * rows.unsqueeze(-1)).amax(dim=2) > 0  # [B, H, Tk]
    vectors = values[f"{record.site}.{record.layer}"]  # [B, Hkv, Tk, D]
    kv_heads = vectors.shape[1]
    heads = []
    for head in range(weights.shape[1]):
        chosen = rows[:, head]
        group = head * kv_heads // weights.shape[1]
        heads.append(
            HeadMeasures(
                row_sum=_mean(stats.row_sum[:, head], chosen),
                entropy=_mean(stats.entropy[:, head], chosen),
                zeros=_mean(stats.zeros[:, head], chosen),
                dead_rows=_mean(~has_weight(stats.row_sum[:, head]), chosen),
                dead_slots=_mean(~read[:, head], keys),
                max=_mean(stats.max[:, head], chosen),
                anisotropy=anisotropy(vectors[:, group][keys]),
            )
        )
    shares = top_shares(weights, percents, visible)
    # Rows without weight have no share; as 0 they would make an attention look less centralised.
    live = rows & has_weight(stats.row_sum)
    curve = tuple(_mean(share, live) for share in shares.unbind(-1))
    return AttentionMeasures(record.site, record.layer, tuple(heads), curve)


def _memories(
    model: Model, batch: Mapping[str, Tensor], percents: Sequence[float]
) -> tuple[MemoryMeasures, ...]:
    reports: list[MemoryReport] = memory_reports(model, batch, percents)
    return tuple(
        MemoryMeasures(
            name=report.name,
            zeros=report.zeros,
            dead_slots=report.dead_slots,
            entropy=report.entropy,
            anisotropy=report.anisotropy,
            output_variance=report.output_variance,
            top_share=report.top_shares,
        )
        for report in reports
    )


def _key_mask(record: AttentionRecord, batch: Mapping[str, Tensor], weights: Tensor) -> Tensor:
    """Bool [B, Tk]: the keys of an attention that are no padding. Persistent slots come first."""
    side = "target" if record.site == "decoder" else "source"
    persistent = weights.shape[-1] - batch[side].shape[1]
    positions = torch.arange(-persistent, batch[side].shape[1], device=weights.device)
    return positions < batch[f"{side}_lengths"].to(weights.device).unsqueeze(-1)


def _mean(values: Tensor, chosen: Tensor) -> float:
    return float(values[chosen].double().mean()) if bool(chosen.any()) else 0.0


@contextmanager
def _capture_values(model: nn.Module, values: dict[str, Tensor]) -> Iterator[None]:
    """Collect the value vectors [B, Hkv, Tk, D] of every attention, by "site.layer"."""
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if not isinstance(module, MultiHeadAttention):
                continue
            part, layer, branch = name.split(".")[:3]
            site = "cross" if branch.startswith("cross") else part
            hook = _ValueHook(values, f"{site}.{layer}", module)
            stack.callback(module.key_value.register_forward_hook(hook).remove)
        yield


@dataclass(frozen=True)
class _ValueHook:
    values: dict[str, Tensor]
    key: str
    attention: MultiHeadAttention

    def __call__(self, _: nn.Module, __: Any, out: Tensor) -> None:
        halves = out.detach().chunk(2, dim=-1)
        keys, vectors = (split_heads(half, self.attention.kv_heads) for half in halves)
        if self.attention.persistent is not None:
            vectors = self.attention.persistent.extend(keys, vectors)[1]
        self.values[self.key] = vectors


def rounded(value: Any) -> Any:
    """Nested plain values with every float rounded to five significant digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    return value
