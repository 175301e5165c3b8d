"""Storing new tokens in pages, with the pages' bounds: one launch instead of two dozen."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from reluformer.ops.backends.triton.launch import (
    LAUNCHES,
    Prepared,
    on_other_device,
    remember,
    signature,
)
from reluformer.ops.backends.triton.layout import last_contiguous
from reluformer.ops.backends.triton.plan import pad

# Tokens that a program moves at once.
_ROWS = tl.constexpr(16)


@triton.jit(do_not_specialize=["steps", "columns", "touched", "kv_heads", "stride_pt"])
def append_kernel(
    keys,
    values,
    key_pool,
    value_pool,
    key_min,
    key_max,
    table,
    lengths,
    counts,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_vb,
    stride_vh,
    stride_vt,
    stride_kp,
    stride_kph,
    stride_kpt,
    stride_vp,
    stride_vph,
    stride_vpt,
    stride_eb,
    stride_eh,
    stride_pt,
    steps,
    columns,
    touched,
    kv_heads,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    BOUNDS: tl.constexpr,
):
    """Tokens of one head that fall on one page; `lengths` are those before, and stay."""
    program = tl.program_id(0)
    head = (program // touched % kv_heads).to(tl.int64)
    b = (program // touched // kv_heads).to(tl.int64)
    before = tl.load(lengths + b).to(tl.int32)
    count = steps
    if HAS_COUNTS:
        count = tl.load(counts + b).to(tl.int32)
    column = before // PAGE + program % touched
    # Slots of this page that are filled now.
    first = tl.maximum(before - column * PAGE, 0)
    last = tl.minimum(before + count - column * PAGE, PAGE)
    if (first < last) & (column < columns):
        page = tl.load(table + b * stride_pt + column).to(tl.int64)
        wide = tl.arange(0, D_PAD)
        value_wide = tl.arange(0, DV_PAD)
        low = tl.full([D_PAD], float("inf"), tl.float32)
        high = tl.full([D_PAD], float("-inf"), tl.float32)
        wrong = tl.zeros([D_PAD], tl.int32)
        for start in tl.range(first // _ROWS * _ROWS, last, _ROWS):
            slot = (start + tl.arange(0, _ROWS)).to(tl.int64)
            new = slot + column * PAGE - before
            inside = ((slot >= first) & (slot < last))[:, None]
            here = inside & (wide < D)[None, :]
            source = b * stride_kb + head * stride_kh + new * stride_kt
            key = tl.load(keys + source[:, None] + wide[None, :], mask=here, other=0.0)
            target = page * stride_kp + head * stride_kph + slot * stride_kpt
            tl.store(key_pool + target[:, None] + wide[None, :], key, mask=here)
            value_here = inside & (value_wide < DV)[None, :]
            source = b * stride_vb + head * stride_vh + new * stride_vt
            value = tl.load(
                values + source[:, None] + value_wide[None, :], mask=value_here, other=0.0
            )
            target = page * stride_vp + head * stride_vph + slot * stride_vpt
            tl.store(value_pool + target[:, None] + value_wide[None, :], value, mask=value_here)
            if BOUNDS:
                key = key.to(tl.float32)
                low = tl.minimum(low, tl.min(tl.where(here, key, float("inf")), 0))
                high = tl.maximum(high, tl.max(tl.where(here, key, float("-inf")), 0))
                wrong = tl.maximum(wrong, tl.max((here & (key != key)).to(tl.int32), 0))
        if BOUNDS:
            place = page * stride_eb + head * stride_eh + wide
            # Bounds of a page that begins here are those of its last user.
            old = (wide < D) & (first > 0)
            old_low = tl.load(key_min + place, mask=old, other=float("inf")).to(tl.float32)
            old_high = tl.load(key_max + place, mask=old, other=float("-inf")).to(tl.float32)
            # Minimum and maximum may drop what is no number; a bound must not.
            wrong = (wrong > 0) | (old_low != old_low)
            low = tl.where(wrong, float("nan"), tl.minimum(low, old_low))
            high = tl.where(wrong, float("nan"), tl.maximum(high, old_high))
            tl.store(key_min + place, low.to(key_min.dtype.element_ty), mask=wide < D)
            tl.store(key_max + place, high.to(key_max.dtype.element_ty), mask=wide < D)


def append(
    keys: Tensor,
    values: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    key_min: Tensor | None,
    key_max: Tensor | None,
    table: Tensor,
    lengths: Tensor,
    counts: Tensor | None,
) -> None:
    """Store keys [B, Hkv, T, D] and values [B, Hkv, T, Dv] behind `lengths` [B] in the pools.

    Tokens past `counts` [B] and past the table are left out; `lengths` does not change.
    """
    if on_other_device(keys):
        with torch.cuda.device(keys.device):
            append(
                keys, values, key_pool, value_pool, key_min, key_max, table, lengths, counts
            )  # fmt: skip
            return
    keys, values = last_contiguous(keys), last_contiguous(values)
    batch, heads, steps, width = keys.shape
    page, value_width = key_pool.shape[2], values.shape[3]
    touched = (steps + page - 2) // page + 1
    tensors = (keys, values, key_pool, value_pool, key_min, key_max, table, lengths, counts)
    key = signature(("append",), tensors)
    launch = LAUNCHES.get(key)
    if launch is None:
        launch = Prepared(
            append_kernel,
            {
                "PAGE": page,
                "D": width,
                "DV": value_width,
                "D_PAD": pad(width),
                "DV_PAD": pad(value_width),
                "HAS_COUNTS": counts is not None,
                "BOUNDS": key_min is not None,
                "num_warps": 4,
            },
        )
        remember(key, launch)
    launch(
        batch * heads * touched,
        [
            *tensors,
            *(step for each in tensors[:4] for step in each.stride()[:3]),
            *((0, 0) if key_min is None else key_min.stride()[:2]),
            table.stride(0), steps, table.shape[1], touched, heads,
        ],
    )  # fmt: skip
