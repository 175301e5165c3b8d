"""The inline PTX of the Gluon kernels in torch, for `gluon_emulator`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def run(code: str, args: list[Any]) -> Any:
    """Result of inline PTX, per element of its arguments or per pair of elements."""
    emulate = next(function for name, function in _INSTRUCTIONS.items() if name in code)
    return emulate(code, *args)


def _halves(pair: Tensor) -> Tensor:
    """The two bfloat16 of an int32: [...] -> [..., 2]."""
    return pair.contiguous().unsqueeze(-1).view(torch.int16).view(torch.bfloat16)


def _pair(low: Tensor, high: Tensor) -> Tensor:
    """Two values, rounded to bfloat16, in one int32."""
    return torch.stack((low, high), -1).to(torch.bfloat16).view(torch.int32).squeeze(-1)


def _gates(bits: Tensor) -> Tensor:
    """int32 whose halves are all ones where a condition [..., 2] holds, else zeros."""
    return bits.to(torch.int16).neg().view(torch.int32).squeeze(-1)


def _permuted(x: Tensor, selected: Tensor) -> Tensor:
    """`prmt`: bytes of x, or copies of their signs, selected by the digits of `selected`."""
    result = torch.zeros_like(x, dtype=torch.int64)
    for at in range(4):
        digit = selected.long() >> (4 * at) & 15
        byte = x.long() >> (8 * (digit & 7)) & 255
        result |= torch.where(digit > 7, (byte >> 7) * 255, byte) << (8 * at)
    return result.to(torch.int32)


def _merge(code: str, left: Tensor, right: Tensor) -> Tensor:
    """`lop3`: bits of `left` where the constant in the code has ones, else of `right`."""
    ones = int(code.split(", ")[3], 16)
    return (left.long() & ones | right.long() & ~ones).to(torch.int32)


def _slope(low: Tensor, high: Tensor, factors: Tensor) -> Tensor:
    """Pairs of two values, rounded to bfloat16, times a pair of bfloat16 factors."""
    return _pair(*(_halves(_pair(low, high)) * _halves(factors)).unbind(-1))


def _transposed(even: Tensor, odd: Tensor) -> Tensor:
    """`movmatrix`: transposed 8 x 8 matrices of the columns [..., row, pair, j, i], as pairs."""
    x = torch.stack((even, odd), -1).movedim((-5, -4, -1), (-3, -2, -1))  # [j, i, row, pair, 2]
    low, high = x.flatten(-2).mT.unflatten(-1, (4, 2)).unbind(-1)
    return _pair(low, high).movedim((-2, -1), (-4, -3))


def _sum(x: Tensor, y: Tensor) -> Tensor:
    """Sum in bfloat16, of bfloat16 tensors or of pairs."""
    if x.dtype == torch.bfloat16:
        return x + y
    return _pair(*(_halves(x) + _halves(y)).unbind(-1))


def _rectified(x: Tensor, *odd: Tensor) -> Tensor:
    """max(x, 0) in bfloat16: of a tensor, or of even and odd columns as pairs."""
    return _pair(x.clamp(min=0), odd[0].clamp(min=0)) if odd else x.clamp(min=0).bfloat16()


def _log_terms(x: Tensor) -> Tensor:
    """Sum of w log2 w of two neighbours in the even columns, 0 in the odd ones."""
    w = x.float().clamp(min=torch.finfo(torch.bfloat16).tiny)
    even, odd = (w * w.log2()).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even + odd, torch.zeros_like(odd)), -1).flatten(-2)


# By an instruction that only this piece of code contains, or the first such in this order.
_INSTRUCTIONS: dict[str, Callable[..., Any]] = {
    "again": lambda code, x: torch.as_tensor(x),
    "lg2": lambda code, x: _log_terms(x),
    "set.gt": lambda code, low, high, p: _pair(low, high) & _gates(_halves(p) > 0),
    "set.ne": lambda code, p: _gates(_halves(p) != 0),
    "mul.rn.bf16x2": lambda code, *args: _slope(*args),
    "prmt": lambda code, low, high, x, selected: _pair(low, high) & _permuted(x, selected),
    "movmatrix": lambda code, *args: _transposed(*args),
    "mov.b32 {": lambda code, x: _halves(x).view(torch.int16).unbind(-1),
    "lop3": _merge,
    "cvt.rn.relu.bf16x2": lambda code, x, *y: _rectified(x, *y),
    "cvt.rn.bf16x2": lambda code, low, high: _pair(low, high),
    "add.rn.bf16x2": lambda code, x, y: _sum(x, y),
    "add.f32": lambda code, x: _halves(x).float().sum(-1),
    "mov.b32 $0, $1;": lambda code, x: torch.as_tensor(x),
    "shl.b32": lambda code, x: x.float(),
}
