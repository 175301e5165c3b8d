"""Checks of the arguments of KV caches: sizes, token counts, new keys and values."""

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from reluformer.errors import UserError, quote
from reluformer.ops.backends.torch_state import autocast_dtype
from reluformer.ops.checks import FLOATS
from reluformer.ops.gate import check_storage

LARGEST_SIZE = 2**31 - 1
"""Largest size of a cache: tables of pages and lengths hold int32."""


def whole_number(value: Any) -> int | None:
    """An integer of Python, numpy or torch as an int; None for anything else."""
    try:
        return int(operator.index(value))
    except TypeError:
        return None


def checked_size(name: str, value: Any) -> int:
    """A size of a cache as an int; a `UserError` unless it is in [1, `LARGEST_SIZE`]."""
    size = whole_number(value)
    if size is None or not 1 <= size <= LARGEST_SIZE:
        raise UserError(
            f"{name} must be a whole number from 1 to {LARGEST_SIZE}, got {quote(value)}"
        )
    return size


def checked_device(device: Any) -> torch.device:
    """The device of tensors that are made for `device`; a `UserError` if torch cannot use it."""
    try:
        return torch.empty(0, device=device).device
    except (AssertionError, RuntimeError, TypeError):
        raise UserError(f"device must be one that torch can use, got {quote(device)}") from None


def token_counts(name: str, numbers: Any, sequences: int) -> list[int]:
    """One count for each sequence, from one number for all or from one number for each."""
    try:
        given = list(numbers)
    except TypeError:
        given = [numbers] * sequences
    counts = [count for count in map(whole_number, given) if count is not None and count >= 0]
    if len(given) != sequences or len(counts) != sequences:
        raise UserError(
            f"{name} must be {sequences} whole numbers of at least 0, or one for all sequences, "
            f"got {quote(numbers)}"
        )
    return counts


def in_dtype_of(stored: Tensor, tensor: Any) -> Any:
    """A tensor in the dtype of `stored` if autocast is enabled for its device."""
    if not isinstance(tensor, Tensor) or autocast_dtype(tensor) is None:
        return tensor
    return tensor.to(stored.dtype)


def check_tokens(
    new: Mapping[str, Any], stored: tuple[Tensor, Tensor] | None, batch: int | None = None
) -> None:
    """Refuse new keys and values that do not fit each other or the cache.

    Args:
        new: Keys [B, Hkv, T, D] and values [B, Hkv, T, Dv] by the names of the arguments.
        stored: Keys [.., Hkv, .., D] and values [.., Hkv, .., Dv] of the cache; None if it is empty
            and takes any sizes.
        batch: Number of sequences; None takes that of the keys.
    """
    for name, tensor in new.items():
        if not isinstance(tensor, Tensor):
            raise UserError(f"{name} must be a tensor, got {type(tensor).__name__}")
    check_storage([*([] if stored is None else [("the cache", stored[0])]), *new.items()])
    for name, tensor in new.items():
        if tensor.dim() != 4:
            raise UserError(f"{name} must have shape [B, Hkv, T, D], got {list(tensor.shape)}")
    keys, values = new.values()
    pools = (keys, values) if stored is None else stored
    dtype, heads = pools[0].dtype, pools[0].shape[1]
    if dtype not in FLOATS:
        raise UserError(f"{next(iter(new))} must be a floating-point tensor, got {dtype}")
    for (name, tensor), pool in zip(new.items(), pools, strict=True):
        wanted = [keys.shape[0] if batch is None else batch, heads, keys.shape[2], pool.shape[3]]
        if list(tensor.shape) != wanted or tensor.dtype != dtype:
            raise UserError(
                f"{name} must be {dtype} of shape {wanted}, "
                f"got {tensor.dtype} of shape {list(tensor.shape)}"
            )
