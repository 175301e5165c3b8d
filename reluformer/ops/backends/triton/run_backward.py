"""Host side of the backward pass: what it allocates and launches.

Two kernels, each of which owns what it writes: no sum depends on an order. For power 1 the first
leaves the signs of the weights to the second, a bit each, which spares it a product. Their memory
is bounded: where it would not hold all heads, the two kernels take turns on some at a time.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from reluformer.ops.backends.triton.backward_choice import choice, sign_bytes
from reluformer.ops.backends.triton.hopper import launch_backward
from reluformer.ops.backends.triton.launch import (
    LAUNCHES,
    Launch,
    on_other_device,
    remember,
    signature,
    steps,
    use_descriptors,
)
from reluformer.ops.backends.triton.layout import row_values, zeroed
from reluformer.ops.backends.triton.plan import Problem, pad
from reluformer.ops.backends.triton.portable.backward_dkv import keys_kernel
from reluformer.ops.backends.triton.portable.backward_dq import queries_kernel
from reluformer.ops.backends.triton.portable.clear_unused_rows import packed_heads
from reluformer.ops.backends.triton.portable.device import BLOCK
from reluformer.ops.backends.triton.portable.row_terms import row_terms_kernel, scale_rows_kernel
from reluformer.ops.backends.triton.portable.sign_bits import SLACK, WORDS

# Rows of a tile of the pass over output gradients.
_SCALED_ROWS = 64

Backward = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


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

    def at(self, batches: slice, heads: slice) -> "Gradients":
        """The same of some batches and heads; there is no mask."""
        return Gradients(*(_at(each, batches, heads) for each in self))


class Results(NamedTuple):
    """What the two kernels fill; the last two only where they are wanted."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    row_dot: Tensor | None
    row_shift: Tensor | None


def backward(problem: Problem, grads: Gradients, need_shift: bool) -> Backward:
    """(dq, dk, dv, O.dO per row, sum of dS per head); the last two are None unless needed."""
    if on_other_device(problem.q):
        with torch.cuda.device(problem.q.device):
            return backward(problem, grads, need_shift)
    q, k, v = problem.q, problem.k, problem.v
    packed = problem.packed
    cu_q, cu_k = problem.cu_q, problem.cu_k
    dq, dk, dv = (
        packed_heads(each, each.shape[-1], cu) for each, cu in ((q, cu_q), (k, cu_k), (v, cu_k))
    )
    row_dot = row_values(q, packed=packed) if grads.out is not None else None
    if q.numel() == 0 or k.numel() == 0:
        shift = q.new_zeros(q.shape[1], dtype=torch.float32) if need_shift else None
        return dq.zero_(), dk.zero_(), dv.zero_(), zeroed(row_dot), shift
    row_shift = row_values(q, packed=packed) if need_shift else None
    results = Results(dq, dk, dv, row_dot, row_shift)
    key = signature((need_shift, *problem[10:]), (*problem.tensors, *grads))
    specialised, heads = choice(key, problem, grads.level, grads.grad_out)
    if heads == 0:
        # Results have the layout of q, k and v.
        _fill(problem, grads, results, None, key, specialised)
    else:
        signs = _sign_buffer(problem, heads)
        for batches, key_heads in _parts(q.shape[0], k.shape[1], heads // problem.group):
            own = slice(key_heads.start * problem.group, key_heads.stop * problem.group)
            part = Results(
                dq[batches, own], dk[batches, key_heads], dv[batches, key_heads],
                _at(row_dot, batches, own), _at(row_shift, batches, own),
            )  # fmt: skip
            own_problem, own_grads = problem.at(batches, own, key_heads), grads.at(batches, own)
            tensors = (*own_problem.tensors, *own_grads, *part)
            key = signature(("signs", need_shift, *problem[10:]), tensors)
            _fill(own_problem, own_grads, part, signs, key, specialised)
    shift = None if row_shift is None else row_shift.sum((0,) if packed else (0, 2))
    return dq, dk, dv, row_dot, shift


def _sign_buffer(problem: Problem, heads: int) -> Tensor:
    """Memory for the signs of so many heads, and what readers run ahead."""
    words = heads * sign_bytes(problem) // 2 + SLACK * WORDS.value
    return problem.q.new_empty((words,), dtype=torch.int16)


def _parts(batches: int, heads: int, fit: int) -> Iterator[tuple[slice, slice]]:
    """Batches and key heads in equal parts of at most `fit` heads; no part has both in part, so
    that [batches, heads, rows] stays contiguous in each."""
    at_once = _even(batches, max(fit // heads, 1))
    of_each = _even(heads, min(fit, heads))
    for batch in range(0, batches, at_once):
        for head in range(0, heads, of_each):
            yield (
                slice(batch, min(batch + at_once, batches)),
                slice(head, min(head + of_each, heads)),
            )


def _even(total: int, most: int) -> int:
    """The size of equal parts of a total, each at most so large; the last may be smaller."""
    return triton.cdiv(total, triton.cdiv(total, most))


def _at(tensor: Tensor | None, batches: slice, heads: slice) -> Tensor | None:
    return None if tensor is None else tensor[batches, heads]


def _fill(
    problem: Problem,
    grads: Gradients,
    results: Results,
    signs: Tensor | None,
    key: tuple[Any, ...],
    specialised: bool,
) -> None:
    """Run both kernels; `key` is the signature of all that their launches depend on."""
    dq, dk, dv, row_dot, row_shift = results
    early = row_dot if specialised or problem.divided else None
    grad_out, terms = key_gradients(
        problem, grads, key, dk, dv, early, signs, specialised=specialised
    )
    if specialised:
        _specialised_query_gradients(problem, grads, key, grad_out, terms, dq, row_shift, signs)
    else:
        query_gradients(problem, grads, key, dq, row_dot, row_shift, signs)


def key_gradients(
    problem: Problem,
    grads: Gradients,
    key: tuple[Any, ...],
    dk: Tensor,
    dv: Tensor,
    row_dot: Tensor | None,
    signs: Tensor | None,
    *,
    specialised: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Fill dk and dv and, where they are there, O.dO per row and signs.

    Returns what it has read in place of the output gradient, and the terms of `_row_terms`.
    """
    q, k, v, grad_out = problem.q, problem.k, problem.v, grads.grad_out
    key = key and ("keys", *key)
    launch = LAUNCHES.get(key)
    tile = launch.tile if launch else problem.tile("keys", signs=signs is not None)
    # Where the pass runs anyway, to divide, its copy costs less than factors in the loop. float16
    # would lose small gradients in the extra rounding.
    prescale = tile.prescale or specialised or (problem.divided and q.element_size() == 2)
    prescaled = prescale and problem.per_row and q.dtype != torch.float16
    scaled = None
    if prescaled:
        scaled = packed_heads(grad_out, grad_out.shape[-1], problem.cu_q)
    if prescaled or row_dot is not None:
        _scale_rows(problem, grads, key, scaled, row_dot)
    grad_out = grad_out if scaled is None else scaled
    terms = _row_terms(problem, grads, key, row_dot, row_scale=prescaled)
    if launch is None and specialised:
        launch = launch_backward.keys_launch(
            problem, grads.level, grad_out, dk, dv, signs=signs is not None
        )
        remember(key, launch)
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
    others = (problem.gamma, problem.threshold, problem.key_lengths)
    if not specialised:
        others = (grads.count, grads.row_sum, *problem.optional)
    launch(q, k, v, grad_out, dk, dv, signs, terms, *others)
    return grad_out, terms


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
        tile = problem.tile("queries", signs=signs is not None)
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


def _specialised_query_gradients(
    problem: Problem,
    grads: Gradients,
    key: tuple[Any, ...],
    grad_out: Tensor,
    terms: Tensor | None,
    dq: Tensor,
    row_shift: Tensor | None,
    signs: Tensor | None,
) -> None:
    """Fill dq and, if it is there, the sum of dS per row, from what `key_gradients` returns."""
    key = key and ("queries", *key)
    launch = LAUNCHES.get(key)
    if launch is None:
        launch = launch_backward.queries_launch(
            problem, grads.level, grad_out, dq, signs=signs is not None
        )
        remember(key, launch)
    pairs = None if signs is None else signs.view(torch.int32)
    launch(
        problem.q, problem.k, problem.v, grad_out, dq, row_shift, pairs, terms, problem.gamma,
        problem.threshold, problem.key_lengths,
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
