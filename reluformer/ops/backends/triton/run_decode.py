"""Host side of decoding: how a call is split over the keys, and what it launches.

Lengths only choose the grid: while a cache grows, nothing is compiled or prepared again.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from reluformer.ops.backends.triton import launch, tuning
from reluformer.ops.backends.triton.launch import LAUNCHES, Prepared, processors, remember
from reluformer.ops.backends.triton.layout import empty_heads, row_values
from reluformer.ops.backends.triton.plan import Problem, pad
from reluformer.ops.backends.triton.portable.decode import combine_kernel, decode_kernel

# More queries than this fill the tiles of the forward kernel.
MOST_QUERIES = 16
# Training on sentences of few words has few queries and keys too, but heads in plenty: there the
# forward kernel is at home.
_ENOUGH_PROGRAMS, _MANY_KEYS = 1024, 4
# Rows of the largest tile, by bytes per element, for want of registers; further rows go to further
# programs, which read the keys again.
_MOST_ROWS = {2: 64, 4: 32}
# Parts that one step of the final sum adds.
_PARTS = 16


class Pages(NamedTuple):
    """Where the keys are when `Problem.k` and `v` are pools [pages, Hkv, page size, D].

    table [B, most pages] int32; key_min and key_max [pages, Hkv, D], or None to read every page.
    """

    table: Tensor
    key_min: Tensor | None
    key_max: Tensor | None


class Split(NamedTuple):
    """Rows and keys of a program's tile, keys of a unit, and the grid."""

    rows: int
    keys: int
    unit: int
    row_tiles: int
    splits: int

    def programs(self, problem: Problem) -> int:
        return self.row_tiles * self.splits * problem.q.shape[0] * problem.k.shape[1]


def suits(problem: Problem) -> bool:
    """Whether a dense call has few queries that leave the forward kernel too little to do."""
    batch, heads, queries, _ = problem.q.shape
    idle = batch * heads < _ENOUGH_PROGRAMS or problem.max_k >= _MANY_KEYS * queries
    return queries <= MOST_QUERIES and idle and not problem.packed and problem.dropout_p == 0


def decode(
    problem: Problem, pages: Pages | None = None, *, row_sums: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Output [B, H, Tq, DV]; on request, or where it is divided by them, row sums, and with a mask
    how many keys each row sees, both [B, H, Tq] or None.

    With `pages` row i of a sequence of n keys stands at key n - Tq + i, `key_lengths` says n and
    `max_k` how many keys the table has room for.
    """
    q, v = problem.q, problem.v
    row_sums = row_sums or problem.divided
    out = empty_heads(q, v.shape[-1])
    count = row_values(q, packed=False) if problem.mask is not None else None
    row_sum = row_values(q, packed=False) if row_sums else None
    if out.numel() == 0 or problem.max_k == 0 or problem.k.numel() == 0:
        for each in (out, row_sum, count):
            if each is not None:
                each.zero_()
        return out, row_sum, count
    tile = _tile(problem, pages is not None)
    split = _split(problem, tile, pages)
    live = None
    room = triton.cdiv(triton.cdiv(problem.max_k, split.unit), split.splits)
    # Without a split they are empty, but there: the kernel is the same.
    parts = (split.splits if split.splits > 1 else 0, *q.shape[:3])
    partial = q.new_empty((*parts, v.shape[-1]), dtype=torch.float32)
    partial_sum, partial_count = (
        None if each is None else q.new_empty(parts, dtype=torch.float32)
        for each in (row_sum, count)
    )
    if pages is not None and pages.key_min is not None:
        live = q.new_empty((split.programs(problem), room), dtype=torch.int32)
    first, second = _prepared(problem, pages, tile, split, row_sums)
    first(
        split.programs(problem),
        [
            q, problem.k, v, out, partial, partial_sum, partial_count, row_sum, count,
            *problem.optional[:4], *(pages or (None, None, None)), live,
            *_numbers(problem, pages, out, split.splits, room),
        ],
    )  # fmt: skip
    if split.splits > 1:
        second(
            q.shape[0] * q.shape[1] * q.shape[2],
            [
                partial, partial_sum, partial_count, out, row_sum, count, problem.gamma,
                problem.key_lengths, *out.stride()[:3], q.shape[0], q.shape[1], problem.max_q,
                problem.max_k, problem.window, split.splits, problem.unit, problem.length_exponent,
                problem.epsilon,
            ],
        )  # fmt: skip
    return out, row_sum, count


def _tile(problem: Problem, paged: bool) -> tuning.Tile:
    q = problem.q
    return tuning.pick("decode", problem.width, paged, problem.group * q.shape[2], q.element_size())


def _split(problem: Problem, tile: tuning.Tile, pages: Pages | None) -> Split:
    """Enough programs to fill the device, each with two units or more to walk over."""
    q, k = problem.q, problem.k
    rows = problem.group * q.shape[2]
    row_tile = min(max(pad(rows), tile.queries), _MOST_ROWS[q.element_size()])
    row_tiles = triton.cdiv(rows, row_tile)
    keys = unit = tile.keys
    if pages is not None:
        size = k.shape[2]
        # A tile of several pages could not leave one of them out.
        keys = min(keys, size) if pages.key_min is not None else keys
        unit = max(keys, size)
    wanted = tile.programs * processors(q.device) // (row_tiles * q.shape[0] * k.shape[1])
    most = triton.cdiv(problem.max_k, unit) // 2
    return Split(row_tile, keys, unit, row_tiles, max(1, min(wanted, most)))


def _numbers(
    problem: Problem, pages: Pages | None, out: Tensor, splits: int, room: int
) -> tuple[float | None, ...]:
    """Scalar arguments of the decoding kernel, in its order."""
    steps = [each.stride()[:3] for each in (problem.q, problem.k, problem.v, out)]
    table_step, bound_steps = 0, (0, 0)
    if pages is not None:
        table_step = pages.table.stride(0)
        if pages.key_min is not None:
            bound_steps = pages.key_min.stride()[:2]
    return (
        *(step for each in steps for step in each),
        *problem.mask_steps(),
        table_step,
        *bound_steps,
        problem.q.shape[0],
        problem.k.shape[1],
        problem.group,
        problem.max_q,
        problem.max_k,
        problem.window,
        splits,
        room,
        problem.scale,
        problem.unit,
        problem.threshold_value,
        problem.length_exponent,
        problem.epsilon,
        slack(problem.q),
    )


def slack(q: Tensor) -> float:
    """Rounding of a score and of its bound together, relative to the sum of their absolute terms.

    A sum of D products in float32 is off by at most D units in the last place, also where the
    hardware truncates instead of rounding; products in tf32 keep ten bits.
    """
    rough = q.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    return q.shape[-1] * 2.0**-21 + (2.0**-8 if rough else 0.0)


def _prepared(
    problem: Problem, pages: Pages | None, tile: tuning.Tile, split: Split, row_sums: bool
) -> tuple[Prepared, Prepared]:
    """Both launches, from memory unless this call differs in more than its lengths."""
    key = _key(problem, pages, tile, split, row_sums)
    found = tuple(LAUNCHES.get(key and (name, *key)) for name in ("decode", "combine"))
    if None not in found:
        return found
    shared = problem.switches(tile)
    has = ("CAUSAL", "WINDOW", "HAS_LENGTHS", "HAS_MASK", "HAS_GAMMA", "DIVIDE")
    named = (
        "D", "DV", "D_PAD", "DV_PAD", "POWER", *has, "HAS_THRESHOLD", "THRESHOLD_TENSOR",
        "PRESCALE", "PTX", "PRECISION", "num_warps", "num_stages",
    )  # fmt: skip
    first = Prepared(
        decode_kernel,
        {
            **{name: shared[name] for name in named},
            "ROWS": split.rows,
            "KEYS": split.keys,
            "PAGE": problem.k.shape[2] if pages is not None else 0,
            "ROW_SUMS": row_sums,
            "SKIP_VALUES": tile.skip,
            "SKIP_PAGES": pages is not None and pages.key_min is not None,
        },
    )
    second = Prepared(
        combine_kernel,
        {
            **{name: shared[name] for name in ("DV", "DV_PAD", *has)},
            "AT_ONCE": _PARTS,
            "PAGED": pages is not None,
            "ROW_SUMS": row_sums,
            "num_warps": 4,
        },
    )
    if key:
        remember(("decode", *key), first)
        remember(("combine", *key), second)
    return first, second


def _key(
    problem: Problem, pages: Pages | None, tile: tuning.Tile, split: Split, row_sums: bool
) -> tuple[Any, ...]:
    """All that the two launches depend on but lengths; empty if an address is not aligned."""
    k, v, mask = problem.k, problem.v, problem.mask
    if any(each is not None and each.data_ptr() % 16 for each in (k, v, mask)):
        return ()
    numbers = (
        tile, split[:2], row_sums, problem.divided, *problem[10:18], k.shape[1], k.stride(),
        v.stride(), v.shape[-1], k.shape[2] if pages is not None else 0,
        # The other steps of a mask change with the lengths.
        None if mask is None else problem.mask_steps()[3],
    )  # fmt: skip
    return launch.signature(numbers, (problem.q, *problem[3:6], *(pages or ())))
