"""Host side of decoding: how a call is split over the keys, and its launches.

Lengths only choose the grid: while a cache grows, nothing is compiled or prepared again.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from reluformer.ops.backends.triton import plan, tuning
from reluformer.ops.backends.triton.launch import (
    SIZED_LAUNCHES,
    Key,
    SizedLaunch,
    on_other_device,
    processors,
    signature,
)
from reluformer.ops.backends.triton.layout import empty_heads, row_values, zeroed
from reluformer.ops.backends.triton.portable.arguments import Strides
from reluformer.ops.backends.triton.portable.decode import combine_kernel, decode_kernel
from reluformer.ops.backends.triton.problem import Problem, cdiv, head_strides, pad

MAX_QUERIES = 16
"""More queries than this fill the tiles of the forward kernel."""
# Short training sentences have few queries and keys too, but many heads: the forward kernel is
# faster there.
_ENOUGH_PROGRAMS, _MANY_KEYS = 1024, 4
# Most rows of a tile by bytes per element, limited by registers. Further rows go to further
# programs, which read the keys again.
_MAX_ROWS = {2: 64, 4: 32}
# Partial results that one step of `combine_kernel` adds.
_PARTS = 16


class Split(NamedTuple):
    """Tile and grid of the decoding kernel."""

    rows: int
    """Query rows of a tile."""
    unit: int
    """Keys of a unit: a tile or a page."""
    row_tiles: int
    splits: int
    """Number of programs that share the keys of a row tile."""

    def programs(self, problem: Problem) -> int:
        """Size of the grid."""
        return self.row_tiles * self.splits * problem.q.shape[0] * problem.k.shape[1]


def should_use(problem: Problem) -> bool:
    """Whether a dense call has too few queries to occupy the GPU with the forward kernel."""
    batch, heads, queries, _ = problem.q.shape
    settings = problem.settings
    is_idle = batch * heads < _ENOUGH_PROGRAMS or settings.max_k >= _MANY_KEYS * queries
    is_dense = not problem.is_packed and settings.dropout_p == 0
    return queries <= MAX_QUERIES and is_idle and is_dense


def decode_pages(problem: Problem, table: Tensor) -> Tensor:
    """Output of a call whose keys and values are pools of pages, see `decode`."""
    if on_other_device(problem.q):
        with torch.cuda.device(problem.q.device):
            return decode_pages(problem, table)
    return decode(problem, table)[0]


def decode(
    problem: Problem, table: Tensor | None = None, *, row_sums: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Run the decoding kernels.

    Args:
        problem: The call. With a `table`, k and v are pools [pages, Hkv, page size, D],
            `key_lengths` holds the length n of each sequence, `max_k` the capacity of the table,
            and query i of a sequence has the key position n - Tq + i.
        table: [B, pages per sequence], int32: the pages of each sequence.
        row_sums: Whether to compute row sums; row normalisation always computes them.

    Returns:
        Output [B, H, Tq, Dv], row sums, and, with a mask, the number of visible keys of each row,
        both [B, H, Tq] or None.
    """
    q, _, v, optional, settings = problem
    row_sums = row_sums or problem.is_row_normalised
    out = empty_heads(q, v.shape[-1])
    count = row_values(q, packed=False) if optional.mask is not None else None
    row_sum = row_values(q, packed=False) if row_sums else None
    if out.numel() == 0 or settings.max_k == 0 or problem.k.numel() == 0:
        return out.zero_(), zeroed(row_sum), zeroed(count)
    tile = _tile(problem, is_paged=table is not None)
    split = _split(problem, tile, is_paged=table is not None)
    # Without a split the partial results are empty, not None: the kernel is the same.
    parts = (split.splits if split.splits > 1 else 0, *q.shape[:3])
    partial = q.new_empty((*parts, v.shape[-1]), dtype=torch.float32)
    partial_sum = None if row_sum is None else q.new_empty(parts, dtype=torch.float32)
    partial_count = None if count is None else q.new_empty(parts, dtype=torch.float32)
    numbers = plan.numbers(problem)
    lengths = (settings.max_q, settings.max_k, settings.window, split.splits)
    *mask_strides, mask_key = problem.mask_strides()
    strides = Strides(
        q=head_strides(q),
        k=head_strides(problem.k),
        v=head_strides(v),
        out=head_strides(out),
        mask_key=mask_key,
    )
    decode_launch, combine_launch = _launches(problem, table, tile, split, row_sums)
    decode_launch(
        split.programs(problem),
        [
            q, problem.k, v, out, partial, partial_sum, partial_count, row_sum, count,
            *optional[:4], table, strides, *mask_strides,
            0 if table is None else table.stride(0),
            q.shape[0], problem.k.shape[1], problem.group, *lengths, numbers,
        ],
    )  # fmt: skip
    if split.splits > 1:
        combine_launch(
            q.shape[0] * q.shape[1] * q.shape[2],
            [
                partial, partial_sum, partial_count, out, row_sum, count, optional.gamma,
                optional.key_lengths, strides.out, q.shape[0], q.shape[1], *lengths, numbers,
            ],
        )  # fmt: skip
    return out, row_sum, count


def _tile(problem: Problem, *, is_paged: bool) -> tuning.Tile:
    q = problem.q
    rows = problem.group * q.shape[2]
    return tuning.pick("decode", problem.width, is_paged, rows, q.element_size())


def _split(problem: Problem, tile: tuning.Tile, *, is_paged: bool) -> Split:
    """A grid that occupies the device, with at least two units of keys per program."""
    q, k = problem.q, problem.k
    rows = problem.group * q.shape[2]
    row_tile = min(max(pad(rows), tile.queries), _MAX_ROWS[q.element_size()])
    row_tiles = cdiv(rows, row_tile)
    unit = max(tile.keys, k.shape[2]) if is_paged else tile.keys
    wanted = tile.programs * processors(q.device) // (row_tiles * q.shape[0] * k.shape[1])
    most = cdiv(problem.settings.max_k, unit) // 2
    return Split(row_tile, unit, row_tiles, max(1, min(wanted, most)))


def _launches(
    problem: Problem, table: Tensor | None, tile: tuning.Tile, split: Split, row_sums: bool
) -> tuple[SizedLaunch, SizedLaunch]:
    """The launches of both kernels, remembered for calls that differ only in their lengths."""
    key = _key(problem, table, tile, split, row_sums)
    decode_key, combine_key = (("decode", *key), ("combine", *key))
    decode_launch, combine_launch = SIZED_LAUNCHES.get(decode_key), SIZED_LAUNCHES.get(combine_key)
    if decode_launch is None or combine_launch is None:
        page = 0 if table is None else problem.k.shape[2]
        config = plan.tile_config(problem, tile)._replace(
            BLOCK_M=split.rows,
            GROUP=1,
            ONE_LOOP=False,
            STATISTICS=int(row_sums),
            PAGE=page,
            SKIP_VALUES=tile.skip,
        )
        decode_launch = SizedLaunch(
            decode_kernel,
            {"CONFIG": config, "num_warps": tile.warps, "num_stages": tile.stages},
        )
        combine_config = plan.row_config(problem)._replace(
            DV=config.DV, DV_PAD=config.DV_PAD, STATISTICS=int(row_sums), PAGE=page
        )
        combine_launch = SizedLaunch(
            combine_kernel, {"AT_ONCE": _PARTS, "CONFIG": combine_config, "num_warps": 4}
        )
        SIZED_LAUNCHES.put(decode_key, decode_launch)
        SIZED_LAUNCHES.put(combine_key, combine_launch)
    return decode_launch, combine_launch


def _key(
    problem: Problem, table: Tensor | None, tile: tuning.Tile, split: Split, row_sums: bool
) -> Key:
    """Everything that the launches depend on but lengths."""
    k, v, mask = problem.k, problem.v, problem.optional.mask
    numbers = (
        tile, split.rows, row_sums, problem.settings._replace(max_q=0, max_k=0), k.shape[1],
        k.stride(), v.stride(), v.shape[-1], k.get_device(), v.get_device(),
        k.data_ptr() % 16 > 0, v.data_ptr() % 16 > 0, None if table is None else k.shape[2],
        # The other strides of a mask change with the lengths.
        None if mask is None else (problem.mask_strides()[3], mask.data_ptr() % 16 > 0),
    )  # fmt: skip
    return signature(numbers, (problem.q, *problem.optional[:3], table))
