"""Statistics of the weights of a transformers model in training."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from reluformer.model.recording import recorded_stats, select_rows
from reluformer.model.records import AttentionRecord
from reluformer.ops.api import attend
from reluformer.ops.call import Call
from reluformer.ops.stats import Stats, has_weight
from reluformer.ops.visibility import Visibility

if TYPE_CHECKING:
    from reluformer.hf.layers import LayerAttention

SAMPLED_ROWS = 64
"""Number of query rows of each sequence whose weights are computed."""


class AttentionSummary(NamedTuple):
    """Means over rows, heads and layers."""

    row_sum: float
    """Sum of the weights of a row before row normalisation."""
    entropy: float
    """Entropy of the row-normalised weights, in nats."""
    zeros: float
    """Share of visible keys whose weight is exactly zero."""
    dead_rows: float
    """Share of rows that see keys and have no weight."""


@contextmanager
def recording(layers: "Iterable[LayerAttention]") -> Iterator[list[AttentionRecord]]:
    """Context in which the calls of attentions append their statistics to the returned list."""
    layers, records = list(layers), list[AttentionRecord]()
    for layer in layers:
        layer.records = records
    try:
        yield records
    finally:
        for layer in layers:
            layer.records = None


def summarise(records: Iterable[AttentionRecord]) -> AttentionSummary | None:
    """Means over all recorded rows that see a key and are not padding; None without such rows."""
    columns: list[list[Tensor]] = [[], [], [], []]
    for each in records:
        stats = each.stats
        assert isinstance(stats, Stats)
        rows = (each.valid & (stats.visible > 0)).expand_as(stats.row_sum)
        values = (stats.row_sum, stats.entropy, stats.zeros, ~has_weight(stats.row_sum))
        for column, value in zip(columns, values, strict=True):
            column.append(value[rows].float())
    if not columns[0] or not sum(part.numel() for part in columns[0]):
        return None
    return AttentionSummary(*(float(torch.cat(column).mean()) for column in columns))


@torch.no_grad()
def record(
    layer: "LayerAttention",
    query: Tensor,
    key: Tensor,
    visibility: Visibility,
    scale: float | None,
    queries: Tensor | None,
) -> None:
    """Append the statistics of a sample of rows to `layer.records`.

    Args:
        layer: The attention.
        query: [B, H, Tq, D].
        key: [B, Hkv, Tk, D].
        visibility: Visible keys.
        scale: Factor on the scores; None is the attention's default.
        queries: Bool [B, Tq], False for padding; None if all rows count.
    """
    assert layer.records is not None
    count = query.shape[2]
    rows = torch.arange(0, count, -(-count // SAMPLED_ROWS), device=query.device)
    # Spread over the sequence, and the last row, which sees most keys.
    rows = count - 1 - rows
    scale = layer.row.default_scale(query.shape[-1]) if scale is None else scale
    call = Call(query, key, key[..., :0], visibility, scale, return_stats=True)
    names = ("gain", "gate")
    options = {name: value for name, value in layer.options().items() if name not in names}
    stats = recorded_stats(attend(layer.row, select_rows(call, rows), options, "reference"))
    assert stats is not None
    valid = torch.ones((1, 1, 1), dtype=torch.bool, device=query.device)
    if queries is not None:
        valid = queries[:, None, rows]
    layer.records.append(AttentionRecord("layer", len(layer.records), stats, valid, None))
