"""Kernel that stores new tokens in the pages of a KV cache."""

from typing import NamedTuple

import triton
import triton.language as tl

from reluformer.ops.backends.triton.portable.arguments import HeadStrides

# Tokens that a program moves at once.
_ROWS = tl.constexpr(16)


class AppendStrides(NamedTuple):
    """Strides of new tokens [B, Hkv, T, D] and of pools [pages, Hkv, page size, D].

    No field is called `values`: inside a kernel that is an attribute of every Triton tuple.
    """

    new_keys: HeadStrides
    new_values: HeadStrides
    key_pool: HeadStrides
    value_pool: HeadStrides


class AppendConfig(NamedTuple):
    """Compile-time sizes; *_PAD is the next power of two."""

    PAGE: int
    D: int
    DV: int
    D_PAD: int
    DV_PAD: int
    HAS_COUNTS: bool


@triton.jit
def _copy_rows(
    src, dst, src_rows, dst_rows, inside, COLS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Copy rows at offsets `src_rows` to offsets `dst_rows`, both [_ROWS]."""
    cols = tl.arange(0, COLS)  # [COLS]
    mask = inside[:, None] & (cols < WIDTH)[None, :]
    tile = tl.load(src + src_rows[:, None] + cols[None, :], mask=mask, other=0.0)  # [_ROWS, COLS]
    tl.store(dst + dst_rows[:, None] + cols[None, :], tile, mask=mask)


@triton.jit(do_not_specialize=["steps", "columns", "touched", "kv_heads", "table_stride"])
def append_kernel(
    keys,
    values,
    key_pool,
    value_pool,
    table,
    lengths,
    counts,
    strides,
    table_stride,
    steps,
    columns,
    touched,
    kv_heads,
    CONFIG: tl.constexpr,
):
    """Store the new tokens of one head that fall on one page; `lengths` does not change.

    A program owns one page of one head and copies its new slots through registers, 16 at a time.
    """
    # The grid is (sequence, head, touched page), pages fastest.
    program = tl.program_id(0)
    head = (program // touched % kv_heads).to(tl.int64)
    b = (program // touched // kv_heads).to(tl.int64)
    before = tl.load(lengths + b).to(tl.int32)
    count = steps
    if CONFIG.HAS_COUNTS:
        count = tl.load(counts + b).to(tl.int32)
    # Column of the table: `touched` pages from the one that holds the next free slot.
    column = before // CONFIG.PAGE + program % touched
    # Slots [first, last) of this page receive new tokens.
    first = tl.maximum(before - column * CONFIG.PAGE, 0)
    last = tl.minimum(before + count - column * CONFIG.PAGE, CONFIG.PAGE)
    if (first < last) & (column < columns):
        page = tl.load(table + b * table_stride + column).to(tl.int64)
        for start in tl.range(first // _ROWS * _ROWS, last, _ROWS):
            slot = (start + tl.arange(0, _ROWS)).to(tl.int64)  # [_ROWS]
            # Index of the new token for each slot.
            new = slot + column * CONFIG.PAGE - before
            inside = (slot >= first) & (slot < last)
            _copy_rows(
                keys, key_pool,
                b * strides.new_keys[0] + head * strides.new_keys[1] + new * strides.new_keys[2],
                page * strides.key_pool[0] + head * strides.key_pool[1]
                + slot * strides.key_pool[2],
                inside, CONFIG.D_PAD, CONFIG.D,
            )  # fmt: skip
            _copy_rows(
                values, value_pool,
                b * strides.new_values[0] + head * strides.new_values[1]
                + new * strides.new_values[2],
                page * strides.value_pool[0] + head * strides.value_pool[1]
                + slot * strides.value_pool[2],
                inside, CONFIG.DV_PAD, CONFIG.DV,
            )  # fmt: skip
