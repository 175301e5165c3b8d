"""Host side of packed calls: outputs whose unused rows are zero, and the work list."""

from typing import NamedTuple

import torch
from torch import Tensor

from reluformer.ops.backends.triton.launch import SIZED_LAUNCHES, SizedLaunch, signature
from reluformer.ops.backends.triton.layout import empty_heads
from reluformer.ops.backends.triton.portable.clear_unused_rows import clear_unused_rows_kernel
from reluformer.ops.backends.triton.portable.packed_schedule import FIELDS, schedule_kernel
from reluformer.ops.backends.triton.problem import cdiv, pad

MAX_SEQUENCES = 8192
"""Largest number of sequences in a work list."""

# Rows that a program clears.
_ROWS = 64
# Calls with more sequences are not sorted: many sequences even out by themselves.
_MAX_SORTED = 128


class WorkListSize(NamedTuple):
    """Number of work items."""

    longest: int
    """Items of the longest sequence."""
    total: int
    """Upper bound for the items of all sequences."""


def work_list_size(
    tokens: int, sequences: int, max_q: int, rows: int, *, paired: bool
) -> WorkListSize:
    """Size of the work list for `tokens` queries in tiles of `rows` rows, or in pairs of tiles."""
    rows = 2 * rows if paired else rows
    longest = cdiv(max_q, rows)
    return WorkListSize(longest, min(sequences * longest, tokens // rows + sequences))


def work_list(cu_q: Tensor, cu_k: Tensor, size: WorkListSize, rows: int, *, paired: bool) -> Tensor:
    """The work list, int32: the number of items, then `FIELDS` values for each item."""
    sequences = cu_q.shape[0] - 1
    work = torch.empty(1 + FIELDS.value * size.total, dtype=torch.int32, device=cu_q.device)
    key = signature(("schedule", rows, paired), (cu_q, cu_k))
    launch = SIZED_LAUNCHES.get(key)
    if launch is None:
        options = {
            "ROWS": rows,
            "PAIRED": paired,
            "SORT": sequences <= _MAX_SORTED,
            "BLOCK": pad(sequences),
            "num_warps": 4,
        }
        launch = SIZED_LAUNCHES.put(key, SizedLaunch(schedule_kernel, options))
    launch(size.longest, [cu_q, cu_k, work, sequences])
    return work


def empty_packed_heads(like: Tensor, width: int, cu: Tensor | None) -> Tensor:
    """`empty_heads`; for packed sequences, rows that belong to no sequence are zero.

    Clearing the whole tensor would take 5 % of the time of an attention over 4,096 tokens.
    """
    out = empty_heads(like, width)
    if cu is None or out.numel() == 0:
        return out
    key = signature(("clear",), (out, cu))
    launch = SIZED_LAUNCHES.get(key)
    if launch is None:
        options = {"ROWS": _ROWS, "WIDTH": width, "PADDED": pad(width), "num_warps": 4}
        launch = SIZED_LAUNCHES.put(key, SizedLaunch(clear_unused_rows_kernel, options))
    heads, tokens = out.shape[1:3]
    numbers = [cu.shape[0] - 1, tokens, heads, *out.stride()[1:3]]
    launch(cdiv(tokens, _ROWS), [out, cu, *numbers])
    return out
