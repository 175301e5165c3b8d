"""Validation of a call: shapes, dtypes and numbers always, tensor contents on request."""

from collections.abc import Mapping
from numbers import Real
from typing import Any, get_args

import torch
from torch import Tensor

from reluformer.errors import UserError, quote
from reluformer.ops.call import Call
from reluformer.ops.definition import Attention
from reluformer.ops.gate import check_call
from reluformer.ops.rule import LARGEST
from reluformer.ops.stats import SumsLevel

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
MOST_KEYS = 2**30
"""Largest window: kernels add positions to it, in 32 bits on a GPU."""
SUMS = (None, *get_args(SumsLevel))


def check_attention(attention: Attention, call: Call, options: Mapping[str, Any]) -> None:
    """Raise a `UserError` if tensors, numbers or options do not fit the attention.

    Only devices, layouts, shapes, dtypes and numbers are checked; `check_contents` reads tensors.
    """
    check_call(call, options)
    check_tensors(call.q, call.k, call.v)
    unknown = sorted(set(options) - attention.options)
    if unknown:
        allowed = ", ".join(sorted(attention.options)) or "none"
        raise UserError(
            f"{attention.name} attention has no option {unknown[0]!r}; its options: {allowed}"
        )
    _check_numbers(call)
    _check_visibility(call)
    if attention.halves and call.q.shape[-1] % 2:
        raise UserError(f"{attention.name} attention needs an even width D, got {call.q.shape[-1]}")
    _check_options(call, options, attention)


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse queries, keys and values whose shapes or dtypes do not fit, without reading them."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor) or tensor.dim() != 4:
            shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise UserError(f"{name} must be a tensor of shape [B, heads, T, D], got {shape}")
    if q.dtype not in FLOATS or k.dtype != q.dtype or v.dtype != q.dtype:
        raise UserError(
            "q, k and v must share one dtype of float16, bfloat16, float32 or float64, "
            f"got {q.dtype}, {k.dtype} and {v.dtype}"
        )
    if q.shape[3] == 0:
        raise UserError(f"q must have a width D of at least 1, got shape {tuple(q.shape)}")
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise UserError(
            f"k must match q in batch and width: q is {tuple(q.shape)}, k is {tuple(k.shape)}"
        )
    if v.shape[:3] != k.shape[:3]:
        raise UserError(
            f"v must match k in batch, heads and keys: k is {tuple(k.shape)}, v is {tuple(v.shape)}"
        )
    if q.shape[1] == 0 or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise UserError(
            f"q's heads must be a multiple of k's heads, got {q.shape[1]} and {k.shape[1]}"
        )


def _check_numbers(call: Call) -> None:
    """Refuse numbers that are out of range."""
    check_scale(call.scale)
    if not is_number(call.dropout_p) or not 0 <= call.dropout_p < 1:
        raise UserError(f"dropout_p must be a number in [0, 1), got {quote(call.dropout_p)}")
    if call.return_sums not in SUMS:
        raise UserError(f"return_sums must be one of {SUMS}, got {quote(call.return_sums)}")
    if type(call.entropy_every) is not int or call.entropy_every < 1:
        raise UserError(
            f"entropy_every must be a whole number of at least 1, got {quote(call.entropy_every)}"
        )


def _check_visibility(call: Call) -> None:
    rules = call.visibility
    if rules.mask is not None and _dtype(rules.mask) != torch.bool:
        raise UserError(f"mask must be a bool tensor (True = visible), got {_dtype(rules.mask)}")
    if call.bias is not None and _dtype(call.bias) not in FLOATS:
        raise UserError(f"bias must be a floating-point tensor, got {_dtype(call.bias)}")
    table = (*call.q.shape[:3], call.k.shape[2])
    for name, tensor in (("mask", rules.mask), ("bias", call.bias)):
        if tensor is not None and not _broadcastable(tensor.shape, table):
            raise UserError(
                f"{name} must be broadcastable to [B, H, Tq, Tk] = {list(table)}, "
                f"got {list(tensor.shape)}"
            )
    lengths = rules.key_lengths
    if lengths is not None and (_dtype(lengths) not in INTS or lengths.shape != call.q.shape[:1]):
        got = f"{_dtype(lengths)} of shape {list(getattr(lengths, 'shape', ()))}"
        raise UserError(
            f"key_lengths must be an integer tensor of shape [{call.q.shape[0]}], got {got}"
        )
    if not isinstance(rules.causal, bool):
        raise UserError(f"causal must be True or False, got {quote(rules.causal)}")
    if rules.window is not None and (type(rules.window) is not int or rules.window < 1):
        raise UserError(f"window must be a whole number of at least 1, got {quote(rules.window)}")
    if rules.window is not None and rules.window > MOST_KEYS:
        raise UserError(f"window must be at most {MOST_KEYS}, got {quote(rules.window)}")


def _check_options(call: Call, options: Mapping[str, Any], attention: Attention) -> None:
    """Refuse options that are no finite numbers, and tensors whose shape does not fit.

    An option that no model learns may still be a tensor of one value per head.
    """
    learned = attention.learned
    batch, heads, rows, _ = call.q.shape
    token = (batch, heads, rows, call.v.shape[3])
    for name, value in options.items():
        kind = learned.get(name, "head")
        if isinstance(value, Tensor):
            if value.dtype not in FLOATS:
                raise UserError(f"{name} must be a floating-point tensor, got {value.dtype}")
            fits = _fits(value.shape, kind, token)
        elif name in learned:
            fits = is_number(value) if kind == "head" else value is None
        elif value is None:
            fits = attention.rule is not None or attention.defaults[name] is None
        else:
            # A rule has sentences of its own.
            is_finite = is_number(value) and abs(value) <= LARGEST
            fits = attention.rule is not None or is_finite
        if not fits:
            got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else quote(value)
            raise UserError(f"{name} must be {_allowed(kind, token)}, got {got}")


def _fits(shape: torch.Size, kind: str, token: tuple[int, ...]) -> bool:
    if kind == "head":
        return shape in ((), (token[1],))
    if kind == "token":
        return _broadcastable(shape, token)
    return shape == ((2,) if kind == "pair" else (token[1] * token[3],))


def _allowed(kind: str, token: tuple[int, ...]) -> str:
    return {
        "head": f"a number or a tensor of shape [{token[1]}] (one value per head)",
        "token": f"a tensor broadcastable to [B, H, Tq, Dv] = {list(token)}",
        "pair": "a tensor of shape [2]",
        "width": f"a tensor of shape [H * Dv] = [{token[1] * token[3]}]",
    }[kind]


def check_contents(attention: Attention, call: Call, options: Mapping[str, Any]) -> None:
    """`check_attention`, then the checks that read tensors and so synchronise with a GPU."""
    check_attention(attention, call, options)
    for name, tensor in (("q", call.q), ("k", call.k), ("v", call.v)):
        if not torch.isfinite(tensor).all():
            raise UserError(f"{name} must be finite, but holds NaN or infinite values")
    # A bias of -inf hides a key.
    if call.bias is not None and not (call.bias < torch.inf).all():
        raise UserError("bias must be finite or -inf, but holds NaN or +inf")
    lengths = call.visibility.key_lengths
    if lengths is not None and bool(((lengths < 0) | (lengths > call.k.shape[2])).any()):
        raise UserError(
            f"key_lengths must be between 0 and {call.k.shape[2]}, got {lengths.tolist()}"
        )
    for name, value in options.items():
        if not isinstance(value, Tensor):
            continue
        if not torch.isfinite(value).all():
            raise UserError(f"{name} must be finite, but holds NaN or infinite values")
        if name == "gamma" and bool((value <= 0).any()):
            raise UserError(f"gamma must be greater than 0, got {value.tolist()}")
        if name == "alpha" and bool(((value <= 1) | (value > 2)).any()):
            raise UserError(f"alpha must be greater than 1 and at most 2, got {value.tolist()}")


def check_scale(scale: Any) -> None:
    """Refuse a factor of the scores that is no finite number."""
    if not is_number(scale) or not abs(scale) <= LARGEST:
        raise UserError(f"scale must be a finite number, got {quote(scale)}")


def is_number(value: Any) -> bool:
    """Whether a value is a number of Python or numpy."""
    # Asked first: an abstract class takes its time.
    return type(value) in (float, int) or isinstance(value, Real)


def _dtype(value: Any) -> Any:
    """The dtype of a tensor; of anything else its type, which no list of dtypes holds."""
    return value.dtype if isinstance(value, Tensor) else type(value).__name__


def _broadcastable(shape: torch.Size, target: tuple[int, ...]) -> bool:
    if len(shape) > len(target):
        return False
    tail = target[len(target) - len(shape) :]
    return all(size in (1, wanted) for size, wanted in zip(shape, tail, strict=True))
