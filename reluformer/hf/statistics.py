"""Statistics of the weights of a model in training."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reluformer.hf.pretrained_model import SAMPLED_ROWS, ReLUFormerPreTrainedModel
from reluformer.model.recording import recorded_stats, select_rows
from reluformer.model.records import AttentionRecord
from reluformer.nn.core import AttentionCore
from reluformer.ops.api import attend
from reluformer.ops.call import Call
from reluformer.ops.stats import Stats, has_weight
from reluformer.ops.visibility import Visibility


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
def recording(
    parts: Iterable[AttentionCore | ReLUFormerPreTrainedModel],
) -> Iterator[list[AttentionRecord]]:
    """Context in which attentions and models append their statistics to the returned list."""
    records: list[AttentionRecord] = []
    handles = []
    for part in parts:
        record = _record if isinstance(part, AttentionCore) else _record_model
        handles.append(part.register_forward_hook(partial(record, records), with_kwargs=True))
    try:
        yield records
    finally:
        for handle in handles:
            handle.remove()


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


def _record(
    records: list[AttentionRecord],
    layer: AttentionCore,
    tensors: tuple[Tensor, ...],
    arguments: Mapping[str, Any],
    output: Any,
) -> None:
    """Forward hook of an attention: append the statistics of a sample of its rows.

    Args:
        records: Receives the statistics.
        layer: The attention.
        tensors: Queries [B, H, Tq, D], keys [B, Hkv, Tk, D] and values.
        arguments: Keyword arguments of the call.
        output: Not used.
    """
    # A compiled graph cannot append to a list.
    if not torch.compiler.is_compiling():
        stats, valid = _sampled_statistics(layer, tensors[0], tensors[1], arguments)
        records.append(AttentionRecord("layer", len(records), stats, valid, None))


def _record_model(
    records: list[AttentionRecord],
    model: ReLUFormerPreTrainedModel,
    arguments: tuple[Any, ...],
    named: Mapping[str, Any],
    output: Any,
) -> None:
    """Forward hook of a model of this package: append the statistics of a second forward pass.

    The random numbers of the training are left as they are.
    """
    if torch.compiler.is_compiling():
        return
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices):
        model.statistics = records
        try:
            model.forward(*arguments, **named)
        finally:
            model.statistics = None


@torch.no_grad()
def _sampled_statistics(
    layer: AttentionCore, query: Tensor, key: Tensor, arguments: Mapping[str, Any]
) -> tuple[Stats, Tensor]:
    """Statistics of a sample of rows, and which of them are not padding."""
    names = ("mask", "causal", "key_lengths", "window")
    visibility = Visibility(**{name: arguments[name] for name in names if name in arguments})
    scale, bias = arguments.get("scale"), arguments.get("bias")
    queries: Tensor | None = arguments.get("query_mask")
    count = query.shape[2]
    rows = torch.arange(0, count, -(-count // SAMPLED_ROWS), device=query.device)
    # Spread over the sequence, and the last row, which sees most keys.
    rows = count - 1 - rows
    scale = layer.row.default_scale(query.shape[-1]) if scale is None else scale
    call = select_rows(Call(query, key, key[..., :0], visibility, scale, return_stats=True), rows)
    if bias is not None:
        call = call._replace(bias=bias[..., rows, :] if bias.shape[-2] > 1 else bias)
    ignored = ("gain", "gate")
    options = {name: value for name, value in layer.options().items() if name not in ignored}
    stats = recorded_stats(attend(layer.row, call, options, "reference"))
    assert isinstance(stats, Stats)
    valid = torch.ones((1, 1, 1), dtype=torch.bool, device=query.device)
    return stats, valid if queries is None else queries[:, None, rows]
