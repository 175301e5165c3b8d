"""The launches of one backward pass, prepared once for each signature."""

from typing import NamedTuple

import torch
from torch import Tensor

from reluformer.ops.backends.triton import plan
from reluformer.ops.backends.triton.backward_choice import Choice, one_pass_tile
from reluformer.ops.backends.triton.descriptors import use_descriptors
from reluformer.ops.backends.triton.hopper import launch_backward
from reluformer.ops.backends.triton.launch import Launch
from reluformer.ops.backends.triton.layout import empty_heads
from reluformer.ops.backends.triton.portable.arguments import Config, Strides
from reluformer.ops.backends.triton.portable.backward_dkv import dkv_kernel
from reluformer.ops.backends.triton.portable.backward_dq import dq_kernel
from reluformer.ops.backends.triton.portable.backward_one_pass import one_pass_kernel
from reluformer.ops.backends.triton.portable.device import BLOCK
from reluformer.ops.backends.triton.portable.row_terms import row_terms_kernel, scale_rows_kernel
from reluformer.ops.backends.triton.problem import Problem, cdiv, head_strides, pad

# Rows of a tile of the pass over output gradients.
_SCALED_ROWS = 64


class Gradients(NamedTuple):
    """Gradients of the outputs, and results of the forward pass that the backward pass reads."""

    grad_out: Tensor
    """[B, H, Tq, Dv], last dimension contiguous."""
    out: Tensor | None = None
    """Output, for the gradients of gamma and of row normalisation."""
    visible_count: Tensor | None = None
    """Number of visible keys of each row, with a mask."""
    grad_sum: Tensor | None = None
    grad_log: Tensor | None = None
    row_sum: Tensor | None = None
    """Row sums, with row normalisation."""

    @property
    def level(self) -> int:
        """0: output only, 1: also row sums or row normalisation, 2: also sums of w log w."""
        if self.grad_log is not None:
            return 2
        return int(self.grad_sum is not None or self.row_sum is not None)

    def select(self, batches: slice, heads: slice) -> "Gradients":
        """The gradients of some batches and heads; without a mask."""
        return Gradients(self.grad_out[batches, heads], *(_at(t, batches, heads) for t in self[1:]))


class Results(NamedTuple):
    """Tensors that the backward kernels fill; the last two only where they are needed."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    row_dot: Tensor | None
    row_shift: Tensor | None

    def select(self, batches: slice, heads: slice, key_heads: slice) -> "Results":
        """The results of some batches and heads."""
        return Results(
            self.dq[batches, heads],
            self.dk[batches, key_heads],
            self.dv[batches, key_heads],
            _at(self.row_dot, batches, heads),
            _at(self.row_shift, batches, heads),
        )


def _at(tensor: Tensor | None, batches: slice, heads: slice) -> Tensor | None:
    return None if tensor is None else tensor[batches, heads]


class BackwardLaunches(NamedTuple):
    """Launches in the order in which they run; None for passes that a call does not need."""

    uses_hopper: bool = False
    scales_grad: bool = False
    """`scale_rows` writes grad_out times its row factors, which dK and dV read instead."""
    dots_first: bool = False
    """`scale_rows` writes dO.O; otherwise `dq` does, where it is needed."""
    has_terms: bool = False
    """`scale_rows` or `row_terms` writes the terms of rows."""
    scale_rows: Launch | None = None
    row_terms: Launch | None = None
    dkv: Launch | None = None
    dq: Launch | None = None
    one_pass: Launch | None = None
    """Computes all gradients, instead of all other launches."""


def prepare(
    problem: Problem, grads: Gradients, results: Results, choice: Choice
) -> BackwardLaunches:
    """The launches for tensors of these shapes and strides."""
    if choice.is_one_pass:
        return BackwardLaunches(one_pass=_one_pass_launch(problem, grads, results))
    has_signs = choice.sign_heads > 0
    tile = plan.pick_tile(problem, "dkv", signs=has_signs)
    is_half = problem.q.element_size() == 2
    # Where the pass runs anyway, for row normalisation, a scaled copy costs less than factors in
    # the loop. float16 would lose small gradients in the extra rounding.
    prescale = tile.prescale or choice.uses_hopper or (problem.is_row_normalised and is_half)
    scales_grad = (
        prescale and problem.has_row_factors and problem.q.dtype != torch.float16
    )  # fmt: skip
    dots_first = results.row_dot is not None and (
        choice.uses_hopper or problem.is_row_normalised
    )  # fmt: skip
    source = grads.grad_out
    if scales_grad:
        source = empty_heads(source, source.shape[-1])
    scale_rows = row_terms = None
    stores = choice.gradient_heads > 0
    # This pass stores terms up to a whole tile of its own; kernels with larger tiles read further.
    joins_terms = (
        dots_first
        and choice.uses_hopper
        and grads.level == 1
        and launch_backward.query_tile_rows(problem, gradients=stores) <= _SCALED_ROWS
    )
    if scales_grad or dots_first:
        scale_rows = _scale_rows_launch(
            problem, grads, source if scales_grad else None, dots=dots_first, terms=joins_terms
        )
    if grads.level > 0 and not joins_terms:
        row_terms = _row_terms_launch(problem, grads.level, is_scaled=scales_grad)
    level, dq, dk, dv = grads.level, results.dq, results.dk, results.dv
    if choice.uses_hopper:
        dkv = launch_backward.dkv_launch(
            problem, level, source, dk, dv, signs=has_signs, gradients=stores
        )
        if stores:
            dq_launch = launch_backward.dq_product_launch(problem, dq, choice.gradient_heads)
        else:
            dq_launch = launch_backward.dq_launch(problem, level, source, dq, signs=has_signs)
    else:
        grads_read = grads._replace(grad_out=source)
        dkv = _dkv_launch(problem, grads_read, results, is_scaled=scales_grad, has_signs=has_signs)
        dq_launch = _dq_launch(problem, grads, results, has_signs=has_signs)
    return BackwardLaunches(
        choice.uses_hopper, scales_grad, dots_first, grads.level > 0, scale_rows, row_terms, dkv,
        dq_launch,
    )  # fmt: skip


def _with_gradients(problem: Problem, config: Config, level: int) -> Config:
    every = problem.settings.entropy_every if level == 2 else 1
    return config._replace(SUM_GRADS=level, ENTROPY_EVERY=every)


def _dkv_launch(
    problem: Problem, grads: Gradients, results: Results, *, is_scaled: bool, has_signs: bool
) -> Launch:
    """The launch for dK and dV; `is_scaled` says that `grad_out` contains the row factors."""
    q, k, v, grad_out = problem.q, problem.k, problem.v, grads.grad_out
    dk, dv = results.dk, results.dv
    tile = plan.pick_tile(problem, "dkv", signs=has_signs)
    tma = use_descriptors((q, k, v, grad_out, dk, dv))
    tiled = [(q, tile.queries), (k, tile.keys), (v, tile.keys), (grad_out, tile.queries)]
    if not problem.is_packed:
        # Gradients of a packed call are stored through pointers: tiles cross sequences.
        tiled += [(dk, tile.keys), (dv, tile.keys)]
    config = _with_gradients(problem, plan.tile_config(problem, tile), grads.level)._replace(
        ROW_FACTORS=problem.has_row_factors, GRAD_SCALED=is_scaled, SIGNS=has_signs, TMA=tma
    )
    strides = Strides(
        q=head_strides(q),
        k=head_strides(k),
        v=head_strides(v),
        grad_out=head_strides(grad_out),
        dk=head_strides(dk),
        dv=head_strides(dv),
        mask_key=problem.mask_strides()[3],
    )
    return Launch(
        dkv_kernel,
        cdiv(problem.settings.max_k, tile.keys) * problem.sequences * k.shape[1],
        (strides, *plan.tile_arguments(problem), plan.numbers(problem)),
        {"CONFIG": config, "num_warps": tile.warps, "num_stages": tile.stages},
        tiled if tma else (),
    )


def _dq_launch(
    problem: Problem, grads: Gradients, results: Results, *, has_signs: bool
) -> Launch:  # fmt: skip
    """The launch for dQ, and dO.O and sums of dS where they are needed."""
    q, k, v, grad_out, dq = problem.q, problem.k, problem.v, grads.grad_out, results.dq
    tile = plan.pick_tile(problem, "dq", signs=has_signs)
    tma = use_descriptors((q, k, v, grad_out, dq))
    tiled = [(q, tile.queries), (k, tile.keys), (v, tile.keys), (grad_out, tile.queries)]
    if not problem.is_packed:
        tiled.append((dq, tile.queries))
    config = _with_gradients(problem, plan.tile_config(problem, tile), grads.level)._replace(
        ROW_DOT=results.row_dot is not None and not problem.is_row_normalised,
        ROW_SHIFT=results.row_shift is not None,
        SIGNS=has_signs,
        TMA=tma,
    )
    strides = Strides(
        q=head_strides(q),
        k=head_strides(k),
        v=head_strides(v),
        out=None if grads.out is None else head_strides(grads.out),
        grad_out=head_strides(grad_out),
        dq=head_strides(dq),
        mask_key=problem.mask_strides()[3],
    )
    return Launch(
        dq_kernel,
        cdiv(problem.settings.max_q, tile.queries) * problem.sequences * q.shape[1],
        (strides, *plan.tile_arguments(problem), plan.numbers(problem)),
        {"CONFIG": config, "num_warps": tile.warps, "num_stages": tile.stages},
        tiled if tma else (),
    )


def _one_pass_launch(problem: Problem, grads: Gradients, results: Results) -> Launch:
    """The launch for all gradients of short sequences."""
    q, k, v, grad_out = problem.q, problem.k, problem.v, grads.grad_out
    tile = one_pass_tile(problem)
    config = _with_gradients(problem, plan.tile_config(problem, tile), grads.level)._replace(
        ROW_DOT=results.row_dot is not None, ROW_SHIFT=results.row_shift is not None
    )
    strides = Strides(
        q=head_strides(q),
        k=head_strides(k),
        v=head_strides(v),
        out=None if grads.out is None else head_strides(grads.out),
        grad_out=head_strides(grad_out),
        dq=head_strides(results.dq),
        dk=head_strides(results.dk),
        dv=head_strides(results.dv),
    )
    return Launch(
        one_pass_kernel,
        problem.sequences * k.shape[1],
        (strides, *plan.row_arguments(problem), plan.numbers(problem)),
        {"CONFIG": config, "num_warps": tile.warps},
    )


def _row_terms_launch(problem: Problem, level: int, *, is_scaled: bool) -> Launch:
    """The launch that computes the terms of all rows, see `row_terms_kernel`."""
    config = _with_gradients(problem, plan.row_config(problem), level)._replace(
        POWER=problem.settings.power, GRAD_SCALED=is_scaled
    )
    blocks = cdiv(problem.settings.max_q, BLOCK.value)
    return Launch(
        row_terms_kernel,
        blocks * problem.sequences * problem.q.shape[1],
        (*plan.row_arguments(problem), plan.numbers(problem)),
        {"CONFIG": config, "num_warps": 4},
    )


def _scale_rows_launch(
    problem: Problem, grads: Gradients, scaled: Tensor | None, *, dots: bool, terms: bool
) -> Launch:
    """The launch that scales output gradients by row factors and computes dO.O and row terms."""
    width = grads.grad_out.shape[-1]
    config = plan.row_config(problem)._replace(
        BLOCK_M=_SCALED_ROWS,
        DV=width,
        DV_PAD=pad(width),
        SCALE_GRAD=scaled is not None,
        ROW_DOT=dots,
        SUM_GRADS=int(terms),
        GRAD_SCALED=scaled is not None,
    )
    rows = cdiv(problem.settings.max_q, _SCALED_ROWS)
    strides = (
        head_strides(grads.grad_out),
        (0, 0, 0) if scaled is None else head_strides(scaled),
        (0, 0, 0) if grads.out is None else head_strides(grads.out),
    )
    return Launch(
        scale_rows_kernel,
        rows * problem.sequences * problem.q.shape[1],
        (*strides, *plan.row_arguments(problem), plan.numbers(problem)),
        {"CONFIG": config, "num_warps": 4},
    )
