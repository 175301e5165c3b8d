"""Host side of storing new tokens in a paged KV cache."""

from typing import NamedTuple

import torch
from torch import Tensor

from reluformer.ops.backends.triton.launch import (
    SIZED_LAUNCHES,
    SizedLaunch,
    on_other_device,
    signature,
)
from reluformer.ops.backends.triton.layout import last_contiguous
from reluformer.ops.backends.triton.portable.append_to_pages import (
    AppendConfig,
    AppendStrides,
    append_kernel,
)
from reluformer.ops.backends.triton.problem import head_strides, pad


class PagePool(NamedTuple):
    """Storage of a paged KV cache."""

    keys: Tensor
    """[pages, Hkv, page size, D]."""
    values: Tensor
    """[pages, Hkv, page size, Dv]."""
    table: Tensor
    """[B, pages per sequence], int32: the pages of each sequence."""
    lengths: Tensor
    """[B], int32: stored tokens of each sequence."""


def append(keys: Tensor, values: Tensor, pool: PagePool, counts: Tensor | None) -> None:
    """Store keys [B, Hkv, T, D] and values [B, Hkv, T, Dv] behind `pool.lengths`.

    Tokens past `counts` [B] and past the table are ignored; `pool.lengths` does not change.
    """
    if on_other_device(keys):
        with torch.cuda.device(keys.device):
            append(keys, values, pool, counts)
            return
    keys, values = last_contiguous(keys), last_contiguous(values)
    batch, heads, steps, width = keys.shape
    page, value_width = pool.keys.shape[2], values.shape[3]
    # Most pages that the new tokens of a sequence can fall on.
    touched = (steps + page - 2) // page + 1
    tensors = (keys, values, *pool, counts)
    key = signature(("append",), tensors)
    launch = SIZED_LAUNCHES.get(key)
    if launch is None:
        config = AppendConfig(
            page, width, value_width, pad(width), pad(value_width), counts is not None
        )
        launch = SizedLaunch(append_kernel, {"CONFIG": config, "num_warps": 4})
        SIZED_LAUNCHES.put(key, launch)
    strides = AppendStrides(
        head_strides(keys), head_strides(values), head_strides(pool.keys), head_strides(pool.values)
    )
    numbers = [pool.table.stride(0), steps, pool.table.shape[1], touched, heads]
    launch(batch * heads * touched, [*tensors, strides, *numbers])
