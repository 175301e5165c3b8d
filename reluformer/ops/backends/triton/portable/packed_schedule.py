"""The work of packed sequences as a list, longest sequences first.

Programs that stay on their multiprocessor take the entries of such a list in turn. Tiles counted
from the longest sequence would be empty in all others, and in the order of the sequences some
programs would get twice the work of others.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from reluformer.ops.backends.triton.launch import LAUNCHES, Prepared, remember, signature

# What an entry holds, all of it about its sequence: the first of its entries, how many there are,
# the first rows of its queries and of its keys, how many there are.
FIELDS = tl.constexpr(6)
# More sequences are taken in their own order: there are enough of them to even out.
_SORTED = 128
MOST = 8192


@triton.jit(do_not_specialize=["sequences"])
def schedule_kernel(
    cu_q,
    cu_k,
    work,
    sequences,
    ROWS: tl.constexpr,
    PAIRED: tl.constexpr,
    SORT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Entry `program` of every sequence that has so many; before the entries, how many there are.

    A sequence has one for each tile of ROWS queries, or with `PAIRED` for two of them.
    """
    unit = tl.program_id(0)
    b = tl.arange(0, BLOCK)
    there = b < sequences
    first_q = tl.load(cu_q + b, mask=there, other=0)
    first_k = tl.load(cu_k + b, mask=there, other=0)
    n_q = tl.load(cu_q + b + 1, mask=there, other=0) - first_q
    n_k = tl.load(cu_k + b + 1, mask=there, other=0) - first_k
    count = tl.cdiv(n_q, ROWS)
    if PAIRED:
        count = tl.cdiv(count, 2)
    # A sequence longer than was said has no room for the rest.
    count = tl.minimum(count, tl.num_programs(0))
    if SORT:
        before = (n_k[None, :] > n_k[:, None]) | (
            (n_k[None, :] == n_k[:, None]) & (b[None, :] < b[:, None])
        )
        start = tl.sum(tl.where(before, count[None, :], 0), 1)
    else:
        start = tl.cumsum(count, 0) - count
    total = tl.sum(count, 0)
    if unit == 0:
        tl.store(work, total)
    # Without any entry the first is one of no rows: programs look before they know.
    own = (unit < count) | ((total == 0) & (b == 0))
    entry = work + 1 + (start + unit) * FIELDS
    tl.store(entry, start, mask=own)
    tl.store(entry + 1, tl.maximum(count, 1), mask=own)
    tl.store(entry + 2, first_q, mask=own)
    tl.store(entry + 3, first_k, mask=own)
    tl.store(entry + 4, n_q, mask=own)
    tl.store(entry + 5, n_k, mask=own)


class Size(NamedTuple):
    """Of a list: entries of the longest sequence, and of all sequences at most."""

    longest: int
    most: int


def size(tokens: int, sequences: int, max_q: int, rows: int, *, paired: bool) -> Size:
    """Of the work on so many queries, in tiles of so many rows or in pairs of them."""
    rows = 2 * rows if paired else rows
    longest = triton.cdiv(max_q, rows)
    return Size(longest, min(sequences * longest, tokens // rows + sequences))


def schedule(cu_q: Tensor, cu_k: Tensor, room: Size, rows: int, *, paired: bool) -> Tensor:
    """The list, int32: the number of entries, then `FIELDS` for each of them."""
    sequences = cu_q.shape[0] - 1
    work = torch.empty(1 + FIELDS.value * room.most, dtype=torch.int32, device=cu_q.device)
    key = signature(("schedule", rows, paired), (cu_q, cu_k))
    launch = LAUNCHES.get(key)
    if launch is None:
        switches = {
            "ROWS": rows,
            "PAIRED": paired,
            "SORT": sequences <= _SORTED,
            "BLOCK": triton.next_power_of_2(sequences),
            "num_warps": 4,
        }
        launch = Prepared(schedule_kernel, switches)
        remember(key, launch)
    launch(room.longest, [cu_q, cu_k, work, sequences])
    return work
