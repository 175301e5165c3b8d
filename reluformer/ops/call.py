"""One attention call, checked: what every implementation receives and returns."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reluformer.errors import UserError
from reluformer.ops.stats import Stats
from reluformer.ops.visibility import Visibility

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class AttentionResult(NamedTuple):
    """An attention's output with the extras that were asked for; the others are None."""

    output: Tensor
    """[B, H, Tq, Dv]."""
    weights: Tensor | None
    """[B, H, Tq, Tk], before dropout and before any output norm or gate."""
    stats: Stats | None
    """Statistics of the weights, each field [B, H, Tq]."""


@dataclass(frozen=True)
class Call:
    """The arguments that all attentions share, after checking.

    q [B, H, Tq, D], k [B, Hkv, Tk, D], v [B, Hkv, Tk, Dv], bias broadcastable to [B, H, Tq, Tk].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    visibility: Visibility
    scale: float
    bias: Tensor | None = None
    dropout_p: float = 0.0
    return_weights: bool = False
    return_stats: bool = False

    @property
    def groups(self) -> int:
        """Query heads that share one key/value head."""
        return self.q.shape[1] // self.k.shape[1]


def check_call(call: Call) -> None:
    """Refuse shapes, dtypes and numbers that cannot work, without reading any tensor."""
    q, k, v = call.q, call.k, call.v
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor) or tensor.dim() != 4:
            shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise UserError(f"{name} must be a tensor of shape [B, heads, T, D], got {shape}")
    if q.dtype not in FLOATS or k.dtype != q.dtype or v.dtype != q.dtype:
        raise UserError(
            "q, k and v must share one dtype of float16, bfloat16, float32 or float64, "
            f"got {q.dtype}, {k.dtype} and {v.dtype}"
        )
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise UserError(
            f"k must match q in batch and width: q is {tuple(q.shape)}, k is {tuple(k.shape)}"
        )
    if v.shape[:3] != k.shape[:3]:
        raise UserError(
            f"v must match k in batch, heads and keys: k is {tuple(k.shape)}, v is {tuple(v.shape)}"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise UserError(
            f"q's heads must be a multiple of k's heads, got {q.shape[1]} and {k.shape[1]}"
        )
    if not math.isfinite(call.scale):
        raise UserError(f"scale must be a finite number, got {call.scale}")
    if not 0 <= call.dropout_p < 1:
        raise UserError(f"dropout_p must be in [0, 1), got {call.dropout_p}")
    _check_visibility(call)


def _check_visibility(call: Call) -> None:
    rules = call.visibility
    if rules.mask is not None and rules.mask.dtype != torch.bool:
        raise UserError(f"mask must be a bool tensor (True = visible), got {rules.mask.dtype}")
    table = (*call.q.shape[:3], call.k.shape[2])
    for name, tensor in (("mask", rules.mask), ("bias", call.bias)):
        if tensor is not None and not _broadcastable(tensor.shape, table):
            raise UserError(
                f"{name} must be broadcastable to [B, H, Tq, Tk] = {list(table)}, "
                f"got {list(tensor.shape)}"
            )
    lengths = rules.key_lengths
    if lengths is not None and (lengths.shape != call.q.shape[:1] or lengths.is_floating_point()):
        raise UserError(
            f"key_lengths must be an integer tensor of shape [{call.q.shape[0]}], "
            f"got {lengths.dtype} of shape {list(lengths.shape)}"
        )
    if rules.window is not None and rules.window < 1:
        raise UserError(f"window must be at least 1, got {rules.window}")


def check_heads(options: Mapping[str, Any], heads: int, learned: Mapping[str, str]) -> None:
    """Refuse a per-head option that is neither a number, a scalar tensor nor of shape [H]."""
    for name, value in options.items():
        if learned.get(name) != "head" or not isinstance(value, Tensor):
            continue
        if value.shape not in ((), (heads,)):
            raise UserError(
                f"{name} must be a number or a tensor of shape [{heads}] (one value per head), "
                f"got shape {list(value.shape)}"
            )


def check_contents(call: Call, options: Mapping[str, Any]) -> None:
    """The checks that read tensors, and so wait for a GPU: only on request."""
    for name, tensor in (("q", call.q), ("k", call.k), ("v", call.v), ("bias", call.bias)):
        if tensor is not None and not torch.isfinite(tensor).all():
            raise UserError(f"{name} must be finite, but holds NaN or infinite values")
    lengths = call.visibility.key_lengths
    if lengths is not None and bool(((lengths < 0) | (lengths > call.k.shape[2])).any()):
        raise UserError(
            f"key_lengths must be between 0 and {call.k.shape[2]}, got {lengths.tolist()}"
        )
    for name, value in options.items():
        if isinstance(value, Tensor) and not torch.isfinite(value).all():
            raise UserError(f"{name} must be finite, but holds NaN or infinite values")
    gamma = options.get("gamma")
    if isinstance(gamma, Tensor) and bool((gamma <= 0).any()):
        raise UserError(f"gamma must be greater than 0, got {gamma.tolist()}")


def _broadcastable(shape: torch.Size, target: tuple[int, ...]) -> bool:
    if len(shape) > len(target):
        return False
    tail = target[len(target) - len(shape) :]
    return all(size in (1, wanted) for size, wanted in zip(shape, tail, strict=True))
