"""The gate that every tensor of a call passes: one device, dense storage, resolved views.

Kernels read memory by address, so a tensor on another device, without storage, or with a lazy
negation would crash them or give wrong numbers. Remembered signatures contain the same facts, so a
repeated call passes without these checks.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from reluformer.errors import UserError
from reluformer.ops.backends.torch_state import autocast_dtype
from reluformer.ops.call import Call


def named_tensors(call: Call, options: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """Names and tensors of a call, q first; arguments that are not tensors are left out."""
    visibility, packing = call.visibility, call.packing
    arguments = [
        ("q", call.q), ("k", call.k), ("v", call.v), ("mask", visibility.mask),
        ("bias", call.bias), ("key_lengths", visibility.key_lengths), *options.items(),
    ]  # fmt: skip
    if packing is not None:
        arguments += [("cu_seq_q", packing.cu_q), ("cu_seq_k", packing.cu_k)]
    return [(name, value) for name, value in arguments if isinstance(value, Tensor)]


def follow_autocast(call: Call) -> Call:
    """The call with q, k and v in the dtype of autocast; the same call if autocast is off."""
    dtype = _dtype_of_autocast(call.q)
    if dtype is None:
        return call
    return call._replace(q=_cast(call.q, dtype), k=_cast(call.k, dtype), v=_cast(call.v, dtype))


def in_autocast_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as autocast casts them for torch's `scaled_dot_product_attention`.

    While autocast is enabled for the device of q, floating-point tensors take its dtype, except
    float64. Values that are not tensors pass; the checks of the call refuse them.
    """
    dtype = _dtype_of_autocast(q)
    return (q, k, v) if dtype is None else (_cast(q, dtype), _cast(k, dtype), _cast(v, dtype))


def _dtype_of_autocast(q: Any) -> torch.dtype | None:
    """The dtype to which autocast casts q, k and v; None if it is off or q is no tensor."""
    return autocast_dtype(q) if isinstance(q, Tensor) else None


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    is_eligible = isinstance(tensor, Tensor) and tensor.is_floating_point()
    return tensor.to(dtype) if is_eligible and tensor.dtype != torch.float64 else tensor


def check_call(call: Call, options: Mapping[str, Any]) -> None:
    """Raise a `UserError` unless all tensors of a call are dense and on the device of q.

    An option of one number, a tensor of shape [], may also be on the CPU.
    """
    check_storage(named_tensors(call, options), options)


def check_storage(tensors: Iterable[tuple[str, Any]], options: Iterable[str] = ()) -> None:
    """Raise a `UserError` unless all tensors are dense and on the device of the first.

    Values that are not tensors pass. `options` names the tensors that may be on the CPU if their
    shape is [].
    """
    place: torch.device | None = None
    first = ""
    for name, tensor in tensors:
        if not isinstance(tensor, Tensor):
            continue
        if tensor.is_nested:
            raise UserError(
                f"{name} must be a dense tensor, got a nested one "
                "(relu_attention_varlen takes sequences of different lengths)"
            )
        if tensor.layout != torch.strided:
            raise UserError(f"{name} must be a dense tensor, got layout {tensor.layout}")
        if place is None:
            place, first = tensor.device, name
        elif tensor.device != place:
            is_number = name in options and tensor.dim() == 0 and tensor.device.type == "cpu"
            if not is_number or place.type == "meta":
                raise UserError(
                    f"{name} must be on {place} as {first} is, got a tensor on {tensor.device}"
                )


def resolve_call(call: Call, options: Mapping[str, Any]) -> tuple[Call, Mapping[str, Any]]:
    """The call and options with lazily negated or zero tensors written out; the same if none is."""
    if torch.compiler.is_compiling() or not any(
        map(_is_lazy, (tensor for _, tensor in named_tensors(call, options)))
    ):
        return call, options
    visibility, packing = call.visibility, call.packing
    if packing is not None:
        packing = packing._replace(cu_q=resolve(packing.cu_q), cu_k=resolve(packing.cu_k))
    visibility = type(visibility)(
        resolve(visibility.mask), visibility.causal, resolve(visibility.key_lengths),
        visibility.window,
    )  # fmt: skip
    call = call._replace(
        q=resolve(call.q), k=resolve(call.k), v=resolve(call.v), bias=resolve(call.bias),
        visibility=visibility, packing=packing,
    )  # fmt: skip
    return call, {name: resolve(value) for name, value in options.items()}


def _is_lazy(tensor: Tensor) -> bool:
    """Whether the memory of the tensor does not hold its numbers."""
    return tensor.is_neg() or tensor._is_zerotensor()


def resolve(value: Any) -> Any:
    """A tensor whose memory holds its numbers; other values as they are."""
    # Compiled operators resolve lazy tensors themselves.
    if not isinstance(value, Tensor) or torch.compiler.is_compiling():
        return value
    value = value.resolve_neg()
    # `clone` writes a zero tensor out, and keeps its gradient.
    return value.clone() if value._is_zerotensor() else value
