"""Calls that record statistics of an attention."""

from typing import Any

import torch
from torch import Tensor

from reluformer.model.config import AttentionConfig, ModelConfig
from reluformer.model.records import Record
from reluformer.ops.backends.registry import BACKENDS, choose
from reluformer.ops.call import AttentionResult, Call
from reluformer.ops.definition import Attention
from reluformer.ops.family.table import lookup
from reluformer.ops.stats import RowSums, Stats
from reluformer.ops.visibility import Visibility


def is_opaque(
    config: ModelConfig, attention: AttentionConfig, record: Record, device: torch.device
) -> bool:
    """Whether this attention, with the statistics it records, is one operator to compilers."""
    row, width = lookup(attention.kind), config.head_width
    q, k = (
        torch.empty(1, heads, 2, width, dtype=torch.float32, device=device)
        for heads in (config.heads, config.key_value_heads)
    )
    call = Call(q, k, k, Visibility(), row.default_scale(width), **record_arguments(record, row))
    rule = row.rectified(attention.fixed_options)
    return BACKENDS[choose(row, call, rule, attention.impl)].opaque


def record_arguments(record: Record, row: Attention, entropy_every: int = 1) -> dict[str, Any]:
    """Fields of a `Call` that make it return the recorded statistics."""
    if record == "row_sum" or record == "entropy":
        sums = {"return_sums": record, "entropy_every": entropy_every}
        return sums if row.regularisable else {}
    return {} if record == "nothing" else {"return_stats": True}


def recorded_stats(result: AttentionResult) -> Stats | RowSums | None:
    """The statistics that a call with `record_arguments` returned."""
    return result.stats if result.sums is None else result.sums


def select_rows(call: Call, rows: Tensor) -> Call:
    """The call with some of its query rows, given by their indices."""
    visible = call.visibility.table(call.q.shape[2], call.k.shape[2], call.q.device)
    if visible is not None and visible.shape[-2] > 1:
        visible = visible[..., rows, :]
    return call._replace(q=call.q[:, :, rows], visibility=Visibility(mask=visible))
