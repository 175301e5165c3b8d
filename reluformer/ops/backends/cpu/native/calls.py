"""The native kernels as functions of tensors.

As in `reluformer.ops.backends.cpu.plan`, a weight is C_i x^power with
x = max(unit q.k + score_offset, 0).
"""

import ctypes
import threading
from typing import NamedTuple

import torch
from torch import Tensor

from reluformer.ops.backends.cpu.native import library
from reluformer.ops.backends.cpu.plan import Plan, row_factor, score_offset
from reluformer.ops.backends.cpu.tables import Gradients, Results, RowTerms

# Larger than any distance between a key and a row.
_NO_WINDOW = 1 << 40

# Addresses and strides of gradients, which a forward pass does not have.
_NO_GRADIENTS = (0,) * 20

# Scratch memory that each thread keeps for small calls, whose time an allocation would dominate.
_KEPT_BYTES = 1 << 18
_LOCAL = threading.local()


def forward(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, gamma: Tensor | None, threshold: Tensor | None
) -> Results:
    """Forward pass, see `tables.Results`; x and the dropout mask are None."""
    kernels = library.load()
    assert kernels is not None
    q, k, v = _dense(q), _dense(k), _dense(v)
    factor = row_factor(plan, q, gamma)
    offset = score_offset(plan, q, threshold)
    out = torch.empty_like(q) if v.shape[3] == q.shape[3] else q.new_empty(*q.shape[:3], v.shape[3])
    sums = q.new_empty(q.shape[:3], dtype=torch.float32) if plan.statistics else None
    addresses = (out.data_ptr(), 0 if sums is None else sums.data_ptr())
    outputs = (addresses, out.stride()[:3], _NO_GRADIENTS)
    problem, _owners = _problem(plan, (q, k, v), offset, factor, outputs)
    scratch = _scratch(kernels.forward_scratch(problem) + 64)
    # Aligned to a cache line.
    is_spoilt = kernels.forward(problem, (scratch.data_ptr() + 63) // 64 * 64)
    return out, sums, None, factor, None, None, bool(is_spoilt)


class RowTotals(NamedTuple):
    """Sums over the keys of each row, [B, H, Tq], from weights that are not rounded."""

    dots: Tensor
    """Sum of weight times the product of value and output gradient."""
    slopes: Tensor
    """Sum of power x^(power - 1) over the positive x."""


def backward(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    threshold: Tensor | None,
    rows: RowTerms,
    totals: RowTotals | None = None,
) -> Gradients:
    """Backward pass; the gradient of the score offset [B, H] is float64.

    `totals`, if it is not None, is filled.
    """
    kernels = library.load()
    assert kernels is not None
    q, k, v, grad = _dense(q), _dense(k), _dense(v), _dense(rows.grad.to(q.dtype))
    constant = rows.constant
    if constant is not None:
        constant = constant.to(torch.float32).expand(q.shape[:3]).contiguous()
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    d_offset = q.new_empty(q.shape[:2], dtype=torch.float64)
    gradients = (
        grad.data_ptr(), 0 if constant is None else constant.data_ptr(), d_offset.data_ptr(),
        dq.data_ptr(), dk.data_ptr(), dv.data_ptr(),
        *grad.stride()[:3], *dq.stride()[:3], *dk.stride()[:3], *dv.stride()[:3],
        *((0, 0) if totals is None else (totals.dots.data_ptr(), totals.slopes.data_ptr())),
    )  # fmt: skip
    outputs = ((0, 0), (0, 0, 0), gradients)
    offset = score_offset(plan, q, threshold)
    problem, _owners = _problem(plan, (q, k, v), offset, rows.ratio, outputs)
    scratch = _scratch(kernels.backward_scratch(problem) + 64)
    is_spoilt = kernels.backward(problem, (scratch.data_ptr() + 63) // 64 * 64)
    return dq, dk, dv, d_offset, bool(is_spoilt)


def _problem(
    plan: Plan,
    inputs: tuple[Tensor, Tensor, Tensor],
    offset: Tensor | None,
    factor: Tensor | float,
    outputs: tuple[tuple[int, int], tuple[int, ...], tuple[int, ...]],
) -> tuple[bytes, tuple[object, ...]]:
    """`Problem` of `problem.h` as bytes, and the objects that own the memory it points to.

    outputs holds the addresses of output and row sums, the output's strides, and the addresses and
    strides of the gradients.
    """
    (q, k, v), visibility = inputs, plan.visibility
    lengths, window = visibility.key_lengths, visibility.window
    if lengths is not None:
        lengths = lengths.to(torch.int64).contiguous()
    if offset is not None:
        offset = offset.to(torch.float32).contiguous()
    owner: object
    factors: tuple[int, ...]
    if isinstance(factor, float):
        owner = number = ctypes.c_float(factor)
        factors = (ctypes.addressof(number), 0, 0, 0)
    else:
        owner = factor = factor.to(torch.float32).expand(q.shape[:3])
        factors = (factor.data_ptr(), *factor.stride())
    problem = library.PROBLEM.pack(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        *outputs[0],
        0 if offset is None else offset.data_ptr(),
        0 if lengths is None else lengths.data_ptr(),
        *factors,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *outputs[1],
        *q.shape,
        *k.shape[1:3],
        v.shape[3],
        plan.power,
        visibility.causal,
        _NO_WINDOW if window is None else min(window, _NO_WINDOW),
        torch.get_num_threads(),
        q.dtype == torch.bfloat16,
        plan.row_normalise,
        plan.unit,
        *outputs[2],
    )
    return problem, (offset, lengths, owner)


def _scratch(size: int) -> Tensor:
    """Memory of at least `size` bytes; small buffers are kept, one for each thread."""
    if size > _KEPT_BYTES:
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    buffer: Tensor | None = getattr(_LOCAL, "buffer", None)
    if buffer is None:
        buffer = _LOCAL.buffer = torch.empty(_KEPT_BYTES, dtype=torch.uint8, device="cpu")
    return buffer


def _dense(tensor: Tensor) -> Tensor:
    """The tensor, copied only if its last axis is not dense."""
    return tensor if tensor.stride(3) == 1 or tensor.shape[3] == 1 else tensor.contiguous()
