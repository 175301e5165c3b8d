"""Host side of the kernels: what forward and backward allocate and launch."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from reluformer.ops.triton import decode_launch
from reluformer.ops.triton.backward import keys_kernel, queries_kernel, scale_rows_kernel
from reluformer.ops.triton.forward import forward_kernel
from reluformer.ops.triton.launcher import (
    LAUNCHES,
    Launch,
    elsewhere,
    remember,
    signature,
    use_descriptors,
)
from reluformer.ops.triton.layout import empty_heads, row_values
from reluformer.ops.triton.problem import Problem, pad

# Rows of a tile of the pass that scales the output gradient.
_SCALED_ROWS = 64

Forward = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
Backward = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def forward(problem: Problem, statistics: int) -> Forward:
    """(output, row sums, sums of w log w, visible counts), None for what is not there.

    `statistics` is 0 for none, 1 for row sums, 2 for both; counts come with a mask.
    """
    if elsewhere(problem.q):
        with torch.cuda.device(problem.q.device):
            return forward(problem, statistics)
    q, k, v = problem.q, problem.k, problem.v
    packed = problem.packed
    if statistics == 0 and decode_launch.suits(problem):
        out, count = decode_launch.decode(problem)
        return out, None, None, count
    out = empty_heads(q, v.shape[-1], zero=packed)
    row_sum = row_values(q, packed=packed) if statistics >= 1 else None
    log_sum = row_values(q, packed=packed) if statistics >= 2 else None
    count = row_values(q, packed=packed) if problem.mask is not None else None
    if out.numel() == 0 or k.numel() == 0:
        return out.zero_(), _zeroed(row_sum), _zeroed(log_sum), _zeroed(count)
    key = signature(("forward", statistics, *problem[10:]), problem.tensors)
    launch = LAUNCHES.get(key)
    if launch is None:
        tile = problem.tile("forward")
        launch = Launch(
            forward_kernel,
            tile,
            triton.cdiv(problem.max_q, tile.queries) * problem.sequences * q.shape[1],
            [(q, tile.queries), (k, tile.keys), (v, tile.keys), (out, tile.queries)],
            (*problem.mask_steps(), *problem.row_steps(), *problem.numbers()),
            {
                **problem.switches(tile),
                "STATISTICS": statistics,
                "TMA": use_descriptors((q, k, v, out)),
            },
            store_by_pointer=int(packed),
        )
        remember(key, launch)
    launch(q, k, v, out, row_sum, log_sum, count, *problem.optional)
    return out, row_sum, log_sum, count


def paged(
    problem: Problem, table: Tensor, key_min: Tensor | None, key_max: Tensor | None
) -> Tensor:
    """Output of a call whose keys and values lie in pages, see `decode_launch`."""
    if elsewhere(problem.q):
        with torch.cuda.device(problem.q.device):
            return paged(problem, table, key_min, key_max)
    return decode_launch.decode(problem, decode_launch.Pages(table, key_min, key_max))[0]


class Gradients(NamedTuple):
    """What arrives at the outputs, and what of the forward pass the backward needs.

    `out` only if O.dO is wanted, for the gradient of gamma; `count` only with a mask.
    """

    out: Tensor | None
    count: Tensor | None
    grad_out: Tensor
    grad_sum: Tensor | None
    grad_log: Tensor | None

    @property
    def level(self) -> int:
        """0: output only, 1: and row sums, 2: and sums of w log w."""
        return 2 if self.grad_log is not None else int(self.grad_sum is not None)


def backward(problem: Problem, grads: Gradients, need_shift: bool) -> Backward:
    """(dq, dk, dv, O.dO per row, sum of dS per row); the last two are None unless needed."""
    if elsewhere(problem.q):
        with torch.cuda.device(problem.q.device):
            return backward(problem, grads, need_shift)
    q, k, v = problem.q, problem.k, problem.v
    packed = problem.packed
    dq, dk, dv = (empty_heads(each, each.shape[-1], zero=packed) for each in (q, k, v))
    row_dot = row_values(q, packed=packed) if grads.out is not None else None
    row_shift = row_values(q, packed=packed) if need_shift else None
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_(), _zeroed(row_dot), _zeroed(row_shift)
    key = signature((need_shift, *problem[10:]), (*problem.tensors, *grads))
    key_gradients(problem, grads, key, dk, dv)
    query_gradients(problem, grads, key, dq, row_dot, row_shift)
    return dq, dk, dv, row_dot, row_shift


def key_gradients(
    problem: Problem, grads: Gradients, key: tuple[Any, ...], dk: Tensor, dv: Tensor
) -> None:
    """Fill dk and dv."""
    q, k, v, grad_out = problem.q, problem.k, problem.v, grads.grad_out
    key = key and ("keys", *key)
    launch = LAUNCHES.get(key)
    tile = problem.tile("keys") if launch is None else launch.tile
    # float16 would lose small gradients in the extra rounding.
    prescaled = tile.prescale and problem.per_row and q.dtype != torch.float16
    if prescaled:
        grad_out = _times_row_factor(problem, grads, key)
    if launch is None:
        launch = Launch(
            keys_kernel,
            tile,
            triton.cdiv(problem.max_k, tile.keys) * problem.sequences * k.shape[1],
            [(q, tile.queries), (k, tile.keys), (v, tile.keys), (grad_out, tile.queries),
             (dk, tile.keys), (dv, tile.keys)],
            (*problem.mask_steps(), *problem.row_steps(), *problem.numbers()),
            {
                **problem.switches(tile),
                "GRADS": grads.level,
                "ROW_SCALE": problem.per_row,
                "PRESCALED": prescaled,
                "TMA": use_descriptors((q, k, v, grad_out, dk, dv)),
            },
            store_by_pointer=2 * problem.packed,
        )  # fmt: skip
        remember(key, launch)
    launch(
        q, k, v, grad_out, dk, dv, grads.grad_sum, grads.grad_log, grads.count, *problem.optional
    )


def query_gradients(
    problem: Problem,
    grads: Gradients,
    key: tuple[Any, ...],
    dq: Tensor,
    row_dot: Tensor | None,
    row_shift: Tensor | None,
) -> None:
    """Fill dq and, where they are there, the two sums per row."""
    q, k, v, grad_out = problem.q, problem.k, problem.v, grads.grad_out
    key = key and ("queries", *key)
    launch = LAUNCHES.get(key)
    if launch is None:
        tile = problem.tile("queries")
        out_steps = (0, 0, 0) if grads.out is None else grads.out.stride()[:-1]
        launch = Launch(
            queries_kernel,
            tile,
            triton.cdiv(problem.max_q, tile.queries) * problem.sequences * q.shape[1],
            [(q, tile.queries), (k, tile.keys), (v, tile.keys), (grad_out, tile.queries),
             (dq, tile.queries)],
            (*out_steps, *problem.mask_steps(), *problem.row_steps(), *problem.numbers()),
            {
                **problem.switches(tile),
                "GRADS": grads.level,
                "ROW_DOT": row_dot is not None,
                "ROW_SHIFT": row_shift is not None,
                "TMA": use_descriptors((q, k, v, grad_out, dq)),
            },
            store_by_pointer=int(problem.packed),
        )  # fmt: skip
        remember(key, launch)
    launch(
        q, k, v, grad_out, dq, grads.out, grads.grad_sum, grads.grad_log, grads.count,
        row_dot, row_shift, *problem.optional,
    )  # fmt: skip


def _times_row_factor(problem: Problem, grads: Gradients, key: tuple[Any, ...]) -> Tensor:
    """C_i dO_i in a tensor of its own."""
    grad_out = grads.grad_out
    scaled = empty_heads(grad_out, grad_out.shape[-1], zero=problem.packed)
    key = key and ("scale", *key)
    launch = LAUNCHES.get(key)
    if launch is None:
        width = grad_out.shape[-1]
        launch = Launch(
            scale_rows_kernel,
            problem.tile("keys"),
            triton.cdiv(problem.max_q, _SCALED_ROWS) * problem.sequences * problem.q.shape[1],
            [(grad_out, _SCALED_ROWS), (scaled, _SCALED_ROWS)],
            (*problem.row_steps(), problem.q.shape[1], problem.max_q, problem.max_k,
             problem.window, problem.unit, problem.length_exponent),
            {
                "ROWS": _SCALED_ROWS,
                "D": width,
                "D_PAD": pad(width),
                "CAUSAL": problem.causal,
                "WINDOW": problem.window > 0,
                "HAS_LENGTHS": problem.key_lengths is not None,
                "HAS_MASK": problem.mask is not None,
                "VARLEN": problem.packed,
                "HAS_GAMMA": problem.gamma is not None,
                "num_warps": 4,
            },
        )  # fmt: skip
        remember(key, launch)
    launch(
        grad_out, scaled, grads.count, problem.gamma, problem.key_lengths, problem.cu_q,
        problem.cu_k,
    )  # fmt: skip
    return scaled


def _zeroed(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.zero_()
