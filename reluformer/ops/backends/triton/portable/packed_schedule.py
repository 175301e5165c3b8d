"""Kernel that lists the work of packed sequences, longest sequences first.

Persistent programs take the items of the list in turn. A grid counted from the longest sequence
would be mostly empty for the other sequences, and in the order of the sequences some programs
would get twice the work of others.
"""

import triton
import triton.language as tl

from reluformer.ops.backends.triton.portable.device import with_scalar

# Values of an item, all about its sequence: index of its first item, number of items, first query
# row, first key row, number of queries, number of keys.
FIELDS = tl.constexpr(6)


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
    """Write item `program` of every sequence that has that many; before the items, their number.

    A program holds the lengths of all sequences, padded to BLOCK, in registers. A sequence has one
    item for each tile of ROWS queries, or, with `PAIRED`, for two of them.
    """
    unit = tl.program_id(0)
    b = tl.arange(0, BLOCK)  # [BLOCK], as all tensors here
    exists = b < sequences
    first_q = tl.load(cu_q + b, mask=exists, other=0)
    first_k = tl.load(cu_k + b, mask=exists, other=0)
    n_q = tl.load(cu_q + b + 1, mask=exists, other=0) - first_q
    n_k = tl.load(cu_k + b + 1, mask=exists, other=0) - first_k
    count = tl.cdiv(n_q, ROWS)
    if PAIRED:
        count = tl.cdiv(count, 2)
    # The list has no room for more rows than `max_q` promised.
    count = tl.minimum(count, tl.num_programs(0))
    if SORT:
        before = (n_k[None, :] > n_k[:, None]) | (
            (n_k[None, :] == n_k[:, None]) & (b[None, :] < b[:, None])
        )  # [BLOCK, BLOCK]
        start = tl.sum(tl.where(before, count[None, :], 0), 1)
    else:
        start = tl.cumsum(count, 0) - count
    total = tl.sum(count, 0)
    if unit == 0:
        tl.store(work, total)
    # An empty list begins with an item of no rows: consumers load an item before they compare.
    selected = (unit < count) | with_scalar(b == 0, total == 0)
    item = work + 1 + (start + unit) * FIELDS
    tl.store(item, start, mask=selected)
    tl.store(item + 1, tl.maximum(count, 1), mask=selected)
    tl.store(item + 2, first_q, mask=selected)
    tl.store(item + 3, first_k, mask=selected)
    tl.store(item + 4, n_q, mask=selected)
    tl.store(item + 5, n_k, mask=selected)
