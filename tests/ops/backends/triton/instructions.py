"""What the pieces of PTX in Gluon kernels compute, in torch: for `slow_motion`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def run(code: str, args: list[Any]) -> Any:
    """The result of a piece of code, an element for each of its arguments' or pairs of them."""
    made = next(make for name, make in _INSTRUCTIONS.items() if name in code)
    return made(code, *args)


def _halves(pair: Tensor) -> Tensor:
    """Two bfloat16 of an int32, [..., 2]."""
    return pair.contiguous().unsqueeze(-1).view(torch.int16).view(torch.bfloat16)


def _pair(low: Tensor, high: Tensor) -> Tensor:
    return torch.stack((low, high), -1).to(torch.bfloat16).view(torch.int32).squeeze(-1)


def _gates(bits: Tensor) -> Tensor:
    """All ones in the halves of an int32 where a condition [..., 2] holds."""
    return bits.to(torch.int16).neg().view(torch.int32).squeeze(-1)


def _permuted(x: Tensor, chosen: Tensor) -> Tensor:
    """Bytes of x, or copies of their signs, as the digits of `chosen` say."""
    result = torch.zeros_like(x, dtype=torch.int64)
    for at in range(4):
        digit = chosen.long() >> (4 * at) & 15
        byte = x.long() >> (8 * (digit & 7)) & 255
        result |= torch.where(digit > 7, (byte >> 7) * 255, byte) << (8 * at)
    return result.to(torch.int32)


def _merge(code: str, left: Tensor, right: Tensor) -> Tensor:
    ones = int(code.split(", ")[3], 16)
    return (left.long() & ones | right.long() & ~ones).to(torch.int32)


def _slope(low: Tensor, high: Tensor, steep: Tensor) -> Tensor:
    left, right = _halves(steep).float().unbind(-1)
    return _pair(low * left, high * right)


def _sum(x: Tensor, y: Tensor) -> Tensor:
    """In bfloat16, of tensors of it or of pairs."""
    if x.dtype == torch.bfloat16:
        return x + y
    return _pair(*(_halves(x) + _halves(y)).unbind(-1))


def _rectified(x: Tensor, *odd: Tensor) -> Tensor:
    """In bfloat16: of a tensor, or of even and odd columns in pairs."""
    return _pair(x.clamp(min=0), odd[0].clamp(min=0)) if odd else x.clamp(min=0).bfloat16()


def _log_terms(x: Tensor) -> Tensor:
    """w log2 w of a pair of neighbours in the even columns, nothing in the odd ones."""
    w = x.float().clamp(min=torch.finfo(torch.bfloat16).tiny)
    even, odd = (w * w.log2()).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even + odd, torch.zeros_like(odd)), -1).flatten(-2)


# What instructions do, by the first of them that tells them apart.
_INSTRUCTIONS: dict[str, Callable[..., Any]] = {
    "lg2": lambda code, x: _log_terms(x),
    "set.gt": lambda code, low, high, p: _pair(low, high) & _gates(_halves(p) > 0),
    "set.ne": lambda code, p: _gates(_halves(p) != 0),
    "mul.f32": lambda code, *args: _slope(*args),
    "prmt": lambda code, low, high, x, chosen: _pair(low, high) & _permuted(x, chosen),
    "mov.b32 {": lambda code, x: _halves(x).view(torch.int16).unbind(-1),
    "lop3": _merge,
    "cvt.rn.relu.bf16x2": lambda code, x, *y: _rectified(x, *y),
    "cvt.rn.bf16x2": lambda code, low, high: _pair(low, high),
    "add.rn.bf16x2": lambda code, x, y: _sum(x, y),
    "add.f32": lambda code, x: _halves(x).float().sum(-1),
    "mov.b32 $0, $1;": lambda code, x: torch.as_tensor(x),
    "shl.b32": lambda code, x: x.float(),
}
