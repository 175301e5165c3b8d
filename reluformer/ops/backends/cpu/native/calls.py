"""Tensors in, tensors out: the compiled kernels as the CPU path calls them.

As in `reluformer.ops.backends.cpu.tiles`, a weight is C_i x^power with x = max(q.k + opening, 0).
"""

import ctypes

import torch
from torch import Tensor

from reluformer.ops.backends.cpu.native import library
from reluformer.ops.backends.cpu.tiles import Plan
from reluformer.ops.backends.torch_state import is_untraced

# Further than any key is from any row.
_NO_WINDOW = 1 << 40

# A forward pass leaves what concerns gradients empty.
_NO_GRADIENTS = (0,) * 18


def supports(
    q: Tensor, k: Tensor, v: Tensor, *, trained: bool, masked: bool, statistics: int
) -> bool:
    """Whether the library is there and runs such a call; `masked` means by a mask or dropout."""
    kernels = library.load()
    if kernels is None or masked or statistics > 1 or not is_untraced(q):
        return False
    if not (q.numel() and k.numel() and v.numel()):
        return False
    if q.dtype != torch.bfloat16:
        return q.dtype == torch.float32
    few = q.shape[2] * q.shape[1] // k.shape[1] < kernels.few_rows
    return kernels.multiplies_bf16 or (few and not trained)


def forward(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, opening: Tensor | None, factor: Tensor | float
) -> tuple[Tensor, Tensor | None]:
    """Output [B, H, Tq, Dv] and, if the plan has statistics, row sums [B, H, Tq].

    opening is [H], factor broadcastable to [B, H, Tq].
    """
    kernels = library.load()
    assert kernels is not None
    q, k, v = _dense(q), _dense(k), _dense(v)
    out = torch.empty_like(q) if v.shape[3] == q.shape[3] else q.new_empty(*q.shape[:3], v.shape[3])
    sums = torch.empty(q.shape[:3]) if plan.statistics else None
    packed, _held = _packed(plan, q, k, v, opening, factor, out, sums, _NO_GRADIENTS)
    scratch = torch.empty(kernels.forward_scratch(packed) + 64, dtype=torch.uint8)
    kernels.forward(packed, _aligned(scratch))
    return out, sums


def backward(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    opening: Tensor | None,
    grad: Tensor,
    ratio: Tensor | float,
    constant: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, and the sum of those of all scores, [B, H] in float64.

    grad is the output's; ratio, broadcastable to [B, H, Tq], multiplies its rows, and constant
    [B, H, Tq] is added to the gradients of a row's weights.
    """
    kernels = library.load()
    assert kernels is not None
    q, k, v, grad = _dense(q), _dense(k), _dense(v), _dense(grad.to(q.dtype))
    if constant is not None:
        constant = constant.to(torch.float32).expand(q.shape[:3]).contiguous()
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    shift = torch.empty(q.shape[:2], dtype=torch.float64)
    addresses = [_address(each) for each in (grad, constant, shift, dq, dk, dv)]
    strides = [step for each in (grad, dq, dk, dv) for step in each.stride()[:3]]
    gradients = (*addresses, *strides)
    packed, _held = _packed(plan, q, k, v, opening, ratio, None, None, gradients)
    scratch = torch.empty(kernels.backward_scratch(packed) + 64, dtype=torch.uint8)
    kernels.backward(packed, _aligned(scratch))
    return dq, dk, dv, shift


def _packed(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    opening: Tensor | None,
    factor: Tensor | float,
    out: Tensor | None,
    sums: Tensor | None,
    gradients: tuple[int, ...],
) -> tuple[bytes, tuple[object, ...]]:
    """The call as `problem.h` lays it out, and what must live as long as that is used."""
    rules, lengths = plan.rules, plan.rules.key_lengths
    if lengths is not None:
        lengths = lengths.to(torch.int64).contiguous()
    if opening is not None:
        opening = opening.to(torch.float32).contiguous()
    held: tuple[object, ...]
    scaling: tuple[int, ...]
    if isinstance(factor, float):
        number = ctypes.c_float(factor)
        held, scaling = (opening, lengths, number), (ctypes.addressof(number), 0, 0, 0)
    else:
        factor = factor.to(torch.float32).expand(q.shape[:3])
        held, scaling = (opening, lengths, factor), (factor.data_ptr(), *factor.stride())
    packed = library.PROBLEM.pack(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        _address(out),
        _address(sums),
        _address(opening),
        _address(lengths),
        *scaling,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *((0, 0, 0) if out is None else out.stride()[:3]),
        *q.shape,
        *k.shape[1:3],
        v.shape[3],
        plan.power,
        rules.causal,
        _NO_WINDOW if rules.window is None else min(rules.window, _NO_WINDOW),
        torch.get_num_threads(),
        q.dtype == torch.bfloat16,
        plan.row_normalise,
        *gradients,
    )
    return packed, held


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _dense(tensor: Tensor) -> Tensor:
    """The tensor, copied only if its last axis is not dense."""
    return tensor if tensor.stride(3) == 1 or tensor.shape[3] == 1 else tensor.contiguous()


def _aligned(scratch: Tensor) -> int:
    """The first address in it at which a line of the cache begins."""
    return (scratch.data_ptr() + 63) // 64 * 64
