"""The native kernels as functions of tensors.

As in `reluformer.ops.backends.cpu.plan`, a weight is C_i x^power with
x = max(unit q.k + score_offset, 0).
"""

import ctypes
import threading

import torch
from torch import Tensor

from reluformer.ops.backends.cpu.native import library
from reluformer.ops.backends.cpu.plan import Plan, row_factor, score_offset
from reluformer.ops.backends.cpu.tables import Gradients, Incoming, Results

# Larger than any distance between a key and a row.
_NO_WINDOW = 1 << 40

# Addresses and strides of gradients, which a forward pass does not have.
_NO_GRADIENTS = (0,) * 19

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
    exact = torch.empty(out.shape, dtype=torch.float32, device="cpu") if plan.keeps_exact else None
    outputs = (out, sums, (_address(exact), *_NO_GRADIENTS))
    problem, _owners = _problem(plan, (q, k, v), offset, factor, outputs)
    scratch = _scratch(kernels.forward_scratch(problem) + 64)
    # Aligned to a cache line.
    is_spoilt = kernels.forward(problem, (scratch.data_ptr() + 63) // 64 * 64)
    return out, sums, None, factor, None, None, exact, bool(is_spoilt)


def backward(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    threshold: Tensor | None,
    rows: Incoming,
    needs_dots: bool,
) -> Gradients:
    """Backward pass; the gradient of the score offset [B, H] is float64.

    `needs_dots` tells whether the sums of each output row times its gradient are needed.
    """
    kernels = library.load()
    assert kernels is not None
    q, k, v, grad = _dense(q), _dense(k), _dense(v), _dense(rows.grad.to(q.dtype))
    grad_sum, sums, output = rows.grad_sum, rows.sums, rows.output
    if grad_sum is not None:
        grad_sum = grad_sum.to(torch.float32).contiguous()
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    d_offset = q.new_empty(q.shape[:2], dtype=torch.float64)
    dots = q.new_empty(q.shape[:3], dtype=torch.float32) if needs_dots else None
    gradients = (
        _address(output if plan.keeps_exact else None), grad.data_ptr(), _address(grad_sum),
        d_offset.data_ptr(), dq.data_ptr(), dk.data_ptr(), dv.data_ptr(),
        *grad.stride()[:3], *dq.stride()[:3], *dk.stride()[:3], *dv.stride()[:3], _address(dots),
    )  # fmt: skip
    offset = score_offset(plan, q, threshold)
    outputs = (output, sums, gradients)
    problem, _owners = _problem(plan, (q, k, v), offset, rows.factor, outputs)
    scratch = _scratch(kernels.backward_scratch(problem) + 64)
    is_spoilt = kernels.backward(problem, (scratch.data_ptr() + 63) // 64 * 64)
    return dq, dk, dv, d_offset, dots, bool(is_spoilt)


def _problem(
    plan: Plan,
    inputs: tuple[Tensor, Tensor, Tensor],
    offset: Tensor | None,
    factor: Tensor | float,
    outputs: tuple[Tensor | None, Tensor | None, tuple[int, ...]],
) -> tuple[bytes, tuple[object, ...]]:
    """`Problem` of `problem.h` as bytes, and the objects that own the memory it points to.

    outputs holds output and row sums, and the addresses and strides of what follows them.
    """
    (q, k, v), visibility = inputs, plan.visibility
    lengths, window = visibility.key_lengths, visibility.window
    if lengths is not None:
        lengths = lengths.to(torch.int64).contiguous()
    mask = visibility.mask
    if mask is not None:
        mask = mask.expand(*q.shape[:3], k.shape[2])
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
        _address(outputs[0]),
        _address(outputs[1]),
        _address(offset),
        _address(lengths),
        _address(mask),
        *factors,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *((0, 0, 0) if outputs[0] is None else outputs[0].stride()[:3]),
        *((0, 0, 0, 0) if mask is None else mask.stride()),
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
    return problem, (offset, lengths, mask, owner)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


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
