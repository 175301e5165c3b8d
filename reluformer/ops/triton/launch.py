"""Host side of the kernels: what forward and backward allocate and launch."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from reluformer.ops.triton import decode_launch, tiles
from reluformer.ops.triton.backward import keys_kernel, queries_kernel
from reluformer.ops.triton.forward import forward_kernel
from reluformer.ops.triton.launcher import (
    LAUNCHES,
    Launch,
    elsewhere,
    remember,
    signature,
    steps,
    use_descriptors,
)
from reluformer.ops.triton.layout import empty_heads, row_values
from reluformer.ops.triton.parts import BLOCK
from reluformer.ops.triton.problem import Problem, pad
from reluformer.ops.triton.rows import row_terms_kernel, scale_rows_kernel
from reluformer.ops.triton.signs import SIDE, SLACK, WIDEST, WORDS
from reluformer.ops.triton.tiles import Kernel

# Rows of a tile of the pass over output gradients.
_SCALED_ROWS = 64

Forward = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
Backward = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def forward(problem: Problem, statistics: int) -> Forward:
    """(output, row sums, sums of w log w, visible counts), None for what is not there.

    `statistics` is 0 for none, 1 for row sums, 2 for both; counts come with a mask. To divide
    by row sums, which the backward pass does too, they must be asked for.
    """
    if elsewhere(problem.q):
        with torch.cuda.device(problem.q.device):
            return forward(problem, statistics)
    q, k, v = problem.q, problem.k, problem.v
    packed = problem.packed
    assert statistics >= 1 or not problem.divided
    if statistics <= 1 and decode_launch.suits(problem):
        out, row_sum, count = decode_launch.decode(problem, row_sums=statistics == 1)
        return out, row_sum, None, count
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
                "EVERY": problem.entropy_every if statistics == 2 else 1,
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
    """Output of a call on pages of keys and values: `decode_launch`."""
    if elsewhere(problem.q):
        with torch.cuda.device(problem.q.device):
            return paged(problem, table, key_min, key_max)
    return decode_launch.decode(problem, decode_launch.Pages(table, key_min, key_max))[0]


class Gradients(NamedTuple):
    """What arrives at the outputs, and what of the forward pass the backward needs.

    `out` only if O.dO is wanted, for the gradient of gamma or of a divided row, which needs
    `row_sum` too; `count` only with a mask.
    """

    out: Tensor | None
    count: Tensor | None
    grad_out: Tensor
    grad_sum: Tensor | None
    grad_log: Tensor | None
    row_sum: Tensor | None = None

    @property
    def level(self) -> int:
        """0: output only, 1: and row sums, by which it may be divided, 2: and sums of w log w."""
        if self.grad_log is not None:
            return 2
        return int(self.grad_sum is not None or self.row_sum is not None)


def backward(problem: Problem, grads: Gradients, need_shift: bool) -> Backward:
    """(dq, dk, dv, O.dO per row, sum of dS per head); the last two are None unless needed."""
    if elsewhere(problem.q):
        with torch.cuda.device(problem.q.device):
            return backward(problem, grads, need_shift)
    q, k, v = problem.q, problem.k, problem.v
    packed = problem.packed
    dq, dk, dv = (empty_heads(each, each.shape[-1], zero=packed) for each in (q, k, v))
    row_dot = row_values(q, packed=packed) if grads.out is not None else None
    if q.numel() == 0 or k.numel() == 0:
        shift = q.new_zeros(q.shape[1], dtype=torch.float32) if need_shift else None
        return dq.zero_(), dk.zero_(), dv.zero_(), _zeroed(row_dot), shift
    key = signature((need_shift, *problem[10:]), (*problem.tensors, *grads))
    row_shift = row_values(q, packed=packed) if need_shift else None
    signs = sign_buffer(problem, grads)
    key_gradients(problem, grads, key, dk, dv, row_dot, signs)
    query_gradients(problem, grads, key, dq, row_dot, row_shift, signs)
    shift = None if row_shift is None else row_shift.sum((0,) if packed else (0, 2))
    return dq, dk, dv, row_dot, shift


def sign_buffer(problem: Problem, grads: Gradients) -> Tensor | None:
    """Memory for the sign of every weight, a bit each, to spare the queries a product.

    The derivative of a ReLU, unlike that of its powers, is known from the sign alone.
    """
    q = problem.q
    if not tiles.current().signs or problem.power > 1 or grads.level > 1:
        return None
    if problem.packed or problem.mask is not None or problem.dropout_p > 0:
        return None
    kernels: tuple[Kernel, ...] = ("keys", "queries")
    used = [problem.tile(kernel) for kernel in kernels]
    if any(tile.queries % SIDE.value or tile.keys % SIDE.value for tile in used):
        return None
    rows = triton.cdiv(problem.max_q, BLOCK.value) * BLOCK.value // SIDE.value
    cols = triton.cdiv(problem.max_k, WIDEST.value) * WIDEST.value // SIDE.value
    blocks = problem.sequences * q.shape[1] * rows * cols
    return q.new_empty(((blocks + SLACK) * WORDS.value,), dtype=torch.int16)


def key_gradients(
    problem: Problem,
    grads: Gradients,
    key: tuple[Any, ...],
    dk: Tensor,
    dv: Tensor,
    row_dot: Tensor | None,
    signs: Tensor | None,
) -> None:
    """Fill dk and dv and, where rows are divided by their sums, O.dO per row; signs if there."""
    q, k, v, grad_out = problem.q, problem.k, problem.v, grads.grad_out
    key = key and ("keys", *key)
    launch = LAUNCHES.get(key)
    tile = problem.tile("keys") if launch is None else launch.tile
    # Where the pass runs anyway, to divide, its copy costs less than factors in the loop. float16
    # would lose small gradients in the extra rounding.
    prescale = tile.prescale or (problem.divided and q.element_size() == 2)
    prescaled = prescale and problem.per_row and q.dtype != torch.float16
    row_dot = row_dot if problem.divided else None
    scaled = None
    if prescaled:
        scaled = empty_heads(grad_out, grad_out.shape[-1], zero=problem.packed)
    if prescaled or problem.divided:
        _scale_rows(problem, grads, key, scaled, row_dot)
    grad_out = grad_out if scaled is None else scaled
    terms = _row_terms(problem, grads, key, row_dot, row_scale=prescaled)
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
                "EVERY": problem.entropy_every if grads.level == 2 else 1,
                "ROW_SCALE": problem.per_row,
                "PRESCALED": prescaled,
                "SIGNS": signs is not None,
                "TMA": use_descriptors((q, k, v, grad_out, dk, dv)),
            },
            store_by_pointer=2 * problem.packed,
        )  # fmt: skip
        remember(key, launch)
    launch(q, k, v, grad_out, dk, dv, signs, terms, grads.count, grads.row_sum, *problem.optional)


def query_gradients(
    problem: Problem,
    grads: Gradients,
    key: tuple[Any, ...],
    dq: Tensor,
    row_dot: Tensor | None,
    row_shift: Tensor | None,
    signs: Tensor | None,
) -> None:
    """Fill dq and, where they are there, the two sums per row; `row_dot` is read if it divides,
    `signs` if there."""
    q, k, v, grad_out = problem.q, problem.k, problem.v, grads.grad_out
    key = key and ("queries", *key)
    launch = LAUNCHES.get(key)
    if launch is None:
        tile = problem.tile("queries")
        launch = Launch(
            queries_kernel,
            tile,
            triton.cdiv(problem.max_q, tile.queries) * problem.sequences * q.shape[1],
            [(q, tile.queries), (k, tile.keys), (v, tile.keys), (grad_out, tile.queries),
             (dq, tile.queries)],
            (*steps(grads.out), *problem.mask_steps(), *problem.row_steps(), *problem.numbers()),
            {
                **problem.switches(tile),
                "GRADS": grads.level,
                "EVERY": problem.entropy_every if grads.level == 2 else 1,
                "ROW_DOT": row_dot is not None and not problem.divided,
                "ROW_SHIFT": row_shift is not None,
                "SIGNS": signs is not None,
                "TMA": use_descriptors((q, k, v, grad_out, dq)),
            },
            store_by_pointer=int(problem.packed),
        )  # fmt: skip
        remember(key, launch)
    pairs = None if signs is None else signs.view(torch.int32)
    launch(
        q, k, v, grad_out, dq, grads.out, grads.grad_sum, grads.grad_log, grads.count,
        grads.row_sum, row_dot, row_shift, pairs, *problem.optional,
    )  # fmt: skip


def _row_terms(
    problem: Problem,
    grads: Gradients,
    key: tuple[Any, ...],
    row_dot: Tensor | None,
    *,
    row_scale: bool,
) -> Tensor | None:
    """What the gradients of the sums add to those of the weights, per row: see `row_terms`."""
    if grads.level == 0:
        return None
    heads = problem.sequences * problem.q.shape[1]
    blocks = triton.cdiv(problem.max_q, BLOCK.value)
    shape = (heads, grads.level, blocks * BLOCK.value)
    terms = problem.q.new_empty(shape, dtype=torch.float32)
    key = key and ("terms", *key)
    launch = LAUNCHES.get(key)
    if launch is None:
        launch = Launch(
            row_terms_kernel,
            problem.tile("keys"),
            blocks * heads,
            [],
            problem.row_numbers(),
            {
                **problem.row_switches(),
                "POWER": problem.power,
                "GRADS": grads.level,
                "EVERY": problem.entropy_every if grads.level == 2 else 1,
                "ROW_SCALE": row_scale,
            },
        )
        remember(key, launch)
    launch(
        grads.grad_sum, grads.grad_log, terms, grads.count, grads.row_sum, row_dot, problem.gamma,
        problem.key_lengths, problem.cu_q, problem.cu_k,
    )  # fmt: skip
    return terms


def _scale_rows(
    problem: Problem,
    grads: Gradients,
    key: tuple[Any, ...],
    scaled: Tensor | None,
    row_dot: Tensor | None,
) -> None:
    """scaled = grad_out times the factor of its row, and O.dO per row: what is there is filled."""
    grad_out = grads.grad_out
    key = key and ("scale", *key)
    launch = LAUNCHES.get(key)
    if launch is None:
        width = grad_out.shape[-1]
        launch = Launch(
            scale_rows_kernel,
            problem.tile("keys"),
            triton.cdiv(problem.max_q, _SCALED_ROWS) * problem.sequences * problem.q.shape[1],
            [],
            (*steps(grad_out), *steps(scaled), *steps(grads.out), *problem.row_numbers()),
            {
                **problem.row_switches(),
                "ROWS": _SCALED_ROWS,
                "DV": width,
                "DV_PAD": pad(width),
                "COPY": scaled is not None,
                "ROW_DOT": row_dot is not None,
            },
        )
        remember(key, launch)
    launch(
        grad_out, scaled, grads.out, row_dot, grads.count, grads.row_sum, problem.gamma,
        problem.key_lengths, problem.cu_q, problem.cu_k,
    )  # fmt: skip


def _zeroed(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.zero_()
