"""Shapes and memory layouts of results, shared by the host code and the fake operators."""

import torch
from torch import Tensor


def empty_heads(like: Tensor, width: int) -> Tensor:
    """A new tensor [B, H, T, width] in the memory order of `like` [B, H, T, D].

    Tensors stored as [B, T, H, D] give results stored as [B, T, H, width], so that joining the
    heads needs no copy. The result is not a view, so that it may be modified in place.
    """
    batch, heads, rows, _ = like.shape
    if like.stride(1) < like.stride(2):
        strides = (rows * heads * width, width, heads * width, 1)
    else:
        strides = (heads * rows * width, rows * width, width, 1)
    return like.new_empty_strided((batch, heads, rows, width), strides)


def row_values(q: Tensor, *, packed: bool) -> Tensor:
    """New float32 [B, H, Tq] for dense queries, zeros [N, H] for packed ones.

    Packed queries come as [1, H, N, D]; rows past the last sequence stay zero.
    """
    if packed:
        return q.new_zeros((q.shape[2], q.shape[1]), dtype=torch.float32)
    return q.new_empty(tuple(q.shape[:3]), dtype=torch.float32)


def zeroed(tensor: Tensor | None) -> Tensor | None:
    """The tensor filled with zeros, or None."""
    return None if tensor is None else tensor.zero_()


def last_contiguous(tensor: Tensor) -> Tensor:
    """The tensor, or a contiguous copy if its last dimension is strided."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def packed_view(tensor: Tensor) -> Tensor:
    """[N, H, D] seen as [1, H, N, D]."""
    return tensor.transpose(0, 1).unsqueeze(0)
