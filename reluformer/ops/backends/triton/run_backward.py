"""Host side of the backward pass: allocation and launches.

One kernel computes dK and dV, another dQ. Each owns its outputs, so no sum depends on the order of
programs. The first kernel may store something that saves the second one products: for power 1 the
signs of the weights, one bit each, or on Hopper GPUs the score gradients. This memory is bounded:
where it does not hold all heads, the two kernels alternate on some heads at a time.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from reluformer.ops.backends.triton import backward_launches
from reluformer.ops.backends.triton.backward_choice import Choice, choose, new_store
from reluformer.ops.backends.triton.backward_launches import BackwardLaunches, Gradients, Results
from reluformer.ops.backends.triton.launch import (
    Key,
    KeyParts,
    Launch,
    Memory,
    on_other_device,
    signature,
)
from reluformer.ops.backends.triton.layout import empty_heads, row_values, zeroed
from reluformer.ops.backends.triton.portable.device import BLOCK
from reluformer.ops.backends.triton.problem import Problem, cdiv
from reluformer.ops.backends.triton.run_packed import empty_packed_heads


class BackwardResult(NamedTuple):
    """Gradients of a call; the last two are None unless they are needed."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    row_dot: Tensor | None
    """dO.O of each row, float32 [B, H, Tq] or [N, H]."""
    shift: Tensor | None
    """Sum of dS of each head, float32 [H]: minus the gradient of the threshold."""


CHOICES: Memory[Choice] = Memory()
BACKWARD_LAUNCHES: Memory[BackwardLaunches] = Memory()


def backward(problem: Problem, grads: Gradients, needs_shift: bool) -> BackwardResult:
    """Run the backward pass; `needs_shift` asks for the sum of dS of each head."""
    if on_other_device(problem.q):
        with torch.cuda.device(problem.q.device):
            return backward(problem, grads, needs_shift)
    q, k, v, optional, _ = problem
    packed = problem.is_packed
    results = Results(
        empty_packed_heads(q, q.shape[-1], optional.cu_q),
        empty_packed_heads(k, k.shape[-1], optional.cu_k),
        empty_packed_heads(v, v.shape[-1], optional.cu_k),
        row_values(q, packed=packed) if grads.out is not None else None,
        row_values(q, packed=packed) if needs_shift else None,
    )
    dq, dk, dv, row_dot, row_shift = results
    if q.numel() == 0 or k.numel() == 0:
        shift = q.new_zeros(q.shape[1], dtype=torch.float32) if needs_shift else None
        return BackwardResult(dq.zero_(), dk.zero_(), dv.zero_(), zeroed(row_dot), shift)
    key = signature(*key_parts(problem, grads, needs_shift))
    choice = CHOICES.get(key)
    if choice is None:
        choice = CHOICES.put(key, choose(problem, grads.level, grads.grad_out))
    store = new_store(problem, choice)
    if store is None:
        _run(problem, grads, results, None, key, choice)
    else:
        length, dtype = store
        stored = q.new_empty((length,), dtype=dtype)
        _run_with_store(problem, grads, results, stored, key, choice)
    shift = None if row_shift is None else row_shift.sum((0,) if packed else (0, 2))
    return BackwardResult(dq, dk, dv, row_dot, shift)


def key_parts(problem: Problem, grads: Gradients, needs_shift: bool) -> KeyParts:
    """Arguments of `signature` for the key of a backward pass in `CHOICES`.

    `BACKWARD_LAUNCHES` has the same key, unless the pass runs in parts.
    """
    return ("backward", needs_shift, problem.settings), (*problem.tensors, *grads)


def _run_with_store(
    problem: Problem, grads: Gradients, results: Results, stored: Tensor, key: Key, choice: Choice
) -> None:
    """Run both kernels on as many heads at a time as `stored` holds."""
    batches, heads = problem.k.shape[:2]
    group = problem.group
    fit = choice.stored_heads // group
    if fit >= batches * heads:
        _run(problem, grads, results, stored, key, choice)
        return
    for batch_part, key_part in _parts(batches, heads, fit):
        part = slice(key_part.start * group, key_part.stop * group)
        part_problem = problem.select(batch_part, part, key_part)
        part_grads = grads.select(batch_part, part)
        part_results = results.select(batch_part, part, key_part)
        # The slices have other shapes, and may not be aligned to 16 bytes.
        tensors = (*part_problem.tensors, *part_grads, *part_results)
        part_key = signature(("backward of a part", choice, problem.settings), tensors)
        _run(part_problem, part_grads, part_results, stored, part_key, choice)


def _parts(batches: int, heads: int, fit: int) -> Iterator[tuple[slice, slice]]:
    """Slices of batches and key heads, in equal parts of at most `fit` heads.

    No part slices both dimensions, so that row values [batches, heads, rows] stay contiguous.
    """
    batch_step = _even(batches, max(fit // heads, 1))
    head_step = _even(heads, min(fit, heads))
    for batch in range(0, batches, batch_step):
        for head in range(0, heads, head_step):
            yield (
                slice(batch, min(batch + batch_step, batches)),
                slice(head, min(head + head_step, heads)),
            )


def _even(total: int, limit: int) -> int:
    """Size of equal parts of `total`, at most `limit` each; the last part may be smaller."""
    return cdiv(total, cdiv(total, limit))


def _run(
    problem: Problem,
    grads: Gradients,
    results: Results,
    stored: Tensor | None,
    key: Key,
    choice: Choice,
) -> None:
    """Launch the row passes and both kernels; `key` is the signature of all tensors."""
    launches = BACKWARD_LAUNCHES.get(key)
    if launches is None:
        launches = backward_launches.prepare(problem, grads, results, choice)
        BACKWARD_LAUNCHES.put(key, launches)
    if launches.one_pass is not None:
        run_one_pass(launches.one_pass, problem, grads, results)
        return
    scratch = new_scratch(launches, problem, grads, stored)
    run_dkv(launches, problem, grads, results, scratch)
    run_dq(launches, problem, grads, results, scratch)


class Scratch(NamedTuple):
    """Temporary tensors of a backward pass; None for those that it does not need."""

    scaled: Tensor | None
    """The output gradient times its row factors, where `BackwardLaunches.scales_grad`."""
    terms: Tensor | None
    """[sequences * H, level, padded rows], float32: see `row_terms_kernel`."""
    stored: Tensor | None
    """Results of dK/dV that dQ reads: weight signs, int16, or pairs of score gradients, int32."""


def new_scratch(
    launches: BackwardLaunches, problem: Problem, grads: Gradients, stored: Tensor | None
) -> Scratch:
    """New temporary tensors for these launches, with `stored`."""
    scaled = terms = None
    if launches.scales_grad:
        # Rows that belong to no packed sequence are neither written nor read.
        scaled = empty_heads(grads.grad_out, grads.grad_out.shape[-1])
    if launches.has_terms:
        terms = problem.q.new_empty(terms_size(problem, grads.level), dtype=torch.float32)
    return Scratch(scaled, terms, stored)


def run_one_pass(launch: Launch, problem: Problem, grads: Gradients, results: Results) -> None:
    """Launch the kernel for all gradients."""
    q, k, v, optional, _ = problem
    grad_out, out, _, grad_sum, grad_log, row_sum = grads
    dq, dk, dv, row_dot, row_shift = results
    launch(
        q, k, v, grad_out, dq, dk, dv, out, grad_sum, grad_log, row_sum, row_dot, row_shift,
        optional,
    )  # fmt: skip


def run_dkv(
    launches: BackwardLaunches,
    problem: Problem,
    grads: Gradients,
    results: Results,
    scratch: Scratch,
) -> None:
    """Launch the passes over rows and the kernel for dK and dV, which fill `scratch` too."""
    q, k, v, optional, _ = problem
    grad_out, out, count, grad_sum, grad_log, row_sum = grads
    scaled, terms, stored = scratch
    row_dot = results.row_dot if launches.dots_first else None
    if launches.scale_rows is not None:
        launches.scale_rows(
            grad_out, scaled, out, row_dot, grad_sum, terms, count, row_sum, optional
        )  # fmt: skip
    if launches.row_terms is not None:
        launches.row_terms(grad_sum, grad_log, terms, count, row_sum, row_dot, optional)
    source = grad_out if scaled is None else scaled
    assert launches.dkv is not None
    launches.dkv(
        q, k, v, source, results.dk, results.dv, stored, terms, count, row_sum, optional
    )  # fmt: skip


def run_dq(
    launches: BackwardLaunches,
    problem: Problem,
    grads: Gradients,
    results: Results,
    scratch: Scratch,
) -> None:
    """Launch the kernel for dQ, dO.O and the sums of dS; `run_dkv` has filled `scratch`."""
    q, k, v, optional, _ = problem
    grad_out, out, count, grad_sum, grad_log, row_sum = grads
    dq, _, _, row_dot, row_shift = results
    scaled, terms, stored = scratch
    pairs = None if stored is None else stored.view(torch.int32)
    assert launches.dq is not None
    if launches.uses_hopper:
        source = grad_out if scaled is None else scaled
        launches.dq(q, k, v, source, dq, row_shift, pairs, terms, optional)
    else:
        launches.dq(
            q, k, v, grad_out, dq, out, grad_sum, grad_log, count, row_sum, row_dot, row_shift,
            pairs, optional,
        )  # fmt: skip


def terms_size(problem: Problem, level: int) -> tuple[int, int, int]:
    """[sequences * H, level, rows padded to whole blocks]."""
    blocks = cdiv(problem.settings.max_q, BLOCK.value)
    return problem.sequences * problem.q.shape[1], level, blocks * BLOCK.value
