"""Tensor-memory (TMA) descriptors: which tensors can have one, and how tiles are described."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from reluformer.ops.backends.triton import tuning
from reluformer.ops.backends.triton.plan import is_interpreting
from reluformer.ops.backends.triton.problem import pad


class View(NamedTuple):
    """Shape, strides and block of a descriptor."""

    shape: list[int]
    strides: list[int]
    block: list[int]


def tile_view(tensor: Tensor, rows: int) -> View:
    """The view of [B, H, T, D] in tiles of `rows` rows x the padded width."""
    width = tensor.shape[-1]
    # The stride of a dimension of size 1 is arbitrary; a descriptor needs a legal one.
    strides = [
        width * 16 if size == 1 and dim < 3 else stride
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    ]
    return View(list(tensor.shape), strides, [1, 1, rows, pad(width)])


def use_descriptors(tensors: Sequence[Tensor]) -> bool:
    """Whether the tiles of these tensors go through descriptors."""
    forced = tuning.current().tma
    # Three-product float32 keeps its operands in registers; descriptors only make it spill.
    if forced is None and tensors[0].element_size() != 2:
        return False
    if forced is False or not all(_has_legal_strides(tensor) for tensor in tensors):
        return False
    if forced or not tensors[0].is_cuda or is_interpreting():
        return bool(forced)
    return torch.version.hip is None and torch.cuda.get_device_capability(tensors[0].device)[0] >= 9


def _has_legal_strides(tensor: Tensor) -> bool:
    """Whether a descriptor can address the tensor: aligned to 16 bytes in every dimension."""
    itemsize = tensor.element_size()
    if tensor.data_ptr() % 16 or tensor.stride(-1) != 1 or tensor.numel() == 0:
        return False
    return all(
        size == 1 or (0 < stride * itemsize < 1 << 40 and stride * itemsize % 16 == 0)
        for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    )
