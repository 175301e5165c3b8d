"""The kernels as registered PyTorch operators, for compilers and dispatch modes.

`reluformer::rectified_attention` is opaque to a compiler (no graph break) and has a fake
implementation and an autograd formula. Without a compiler or dispatch mode, `RectifiedAttention`
is the same formula as a plain autograd function, which takes a tenth of the host time. Triton
itself is imported at the first call.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reluformer.errors import UserError
from reluformer.ops.backends import recompute
from reluformer.ops.backends.gamma_gradient import RowGradients, gamma_gradient
from reluformer.ops.backends.torch_state import is_untraced, needs_plain_backward
from reluformer.ops.backends.triton.layout import empty_heads, last_contiguous, row_values
from reluformer.ops.backends.triton.portable.arguments import OptionalInputs
from reluformer.ops.backends.triton.problem import Problem, Settings
from reluformer.ops.call import Call
from reluformer.ops.rule import Rectified
from reluformer.ops.visibility import Visibility

# The fields of a `Problem`, in the order of `flatten`.
_PROBLEM = (
    "Tensor q, Tensor k, Tensor v, "
    # OptionalInputs
    "Tensor? gamma, Tensor? threshold, Tensor? key_lengths, Tensor? mask, Tensor? cu_q, "
    "Tensor? cu_k, Tensor? seed, "
    # Settings
    "float scale, SymInt max_q, SymInt max_k, float gamma_value, float threshold_value, "
    "float length_exponent, int power, bool causal, int window, float dropout_p, "
    "int entropy_every, float row_normalise"
)
# The fields of `run_backward.Gradients`.
_GRADIENTS = (
    "Tensor grad_out, Tensor? out, Tensor? visible_count, Tensor? grad_sum, Tensor? grad_log, "
    "Tensor? row_sum"
)

_library = torch.library.Library("reluformer", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema in (
    f"rectified_attention({_PROBLEM}, int statistics)"
    " -> (Tensor out, Tensor row_sum, Tensor log_sum, Tensor count)",
    f"rectified_attention_backward({_PROBLEM}, {_GRADIENTS}, bool needs_shift)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor row_dot, Tensor shift)",
    f"paged_attention({_PROBLEM}, Tensor table) -> Tensor",
):
    _library.define(  # type: ignore[no-untyped-call]
        _schema, tags=(torch.Tag.pt2_compliant_tag,)
    )


def flatten(problem: Problem) -> tuple[Any, ...]:
    """The fields of a problem as arguments of an operator."""
    return (*problem.tensors, *problem.settings)


def unflatten(arguments: Iterable[Any]) -> tuple[Problem, tuple[Any, ...]]:
    """The problem in the arguments of an operator, and the other arguments."""
    values = iter(arguments)
    q, k, v = islice(values, 3)
    optional = OptionalInputs(*islice(values, len(OptionalInputs._fields)))
    settings = Settings(*islice(values, len(Settings._fields)))
    return Problem(q, k, v, optional, settings), tuple(values)


class Host(NamedTuple):
    """The modules that import Triton."""

    run_forward: Any
    run_backward: Any
    run_decode: Any


@cache
def host() -> Host:
    from reluformer.ops.backends.triton import run_backward, run_decode, run_forward

    return Host(run_forward, run_backward, run_decode)


Outputs = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Output, row sums, sums of w log w and visible counts; None or empty if not computed."""


def attend_traced(problem: Problem, statistics: int) -> Outputs:
    """`run_forward.forward` as the registered operator."""
    operator = torch.ops.reluformer.rectified_attention.default
    result: Outputs = operator(*flatten(problem), statistics)
    return result


def attend_pages(problem: Problem, table: Tensor) -> Tensor:
    """`run_decode.decode_pages`, without gradients."""
    result: Tensor
    if is_untraced(problem.q):
        result = host().run_decode.decode_pages(problem, table)
    else:
        result = torch.ops.reluformer.paged_attention.default(*flatten(problem), table)
    return result


def _save(ctx: Any, problem: Problem, outputs: Outputs) -> None:
    """Store what the backward pass needs: all inputs, and few results."""
    out, row_sum, log_sum, count = outputs
    # Results are only read for the gradients of gamma and of row normalisation.
    needs_gamma = ctx.needs_input_grad[3]
    keeps_results = needs_gamma or problem.is_row_normalised
    if count is not None:
        ctx.mark_non_differentiable(count)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(
        *problem.tensors,
        out if keeps_results else None,
        row_sum if keeps_results else None,
        log_sum if needs_gamma else None,
        count,
    )
    ctx.settings = problem.settings


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of all inputs, from the gradients of all outputs."""
    *inputs, out, row_sum, log_sum, count = ctx.saved_tensors
    problem, _ = unflatten((*inputs, *ctx.settings))
    gradients: Sequence[Tensor | None]
    if needs_plain_backward(*grads):
        gradients = recomputed_gradients(problem, grads)
    else:
        gradients = input_gradients(
            problem, (out, row_sum, log_sum, count), grads, ctx.needs_input_grad[3:5]
        )
    return *gradients, *[None] * (len(ctx.needs_input_grad) - len(gradients))


class RectifiedAttention(torch.autograd.Function):
    """The forward and backward pass without the dispatcher.

    q, k, v, gamma and threshold are the tensors of the problem, for autograd.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gamma: Tensor | None,
        threshold: Tensor | None,
        problem: Problem,
        statistics: int,
    ) -> Outputs:
        result: Outputs = host().run_forward.forward(problem, statistics)
        _save(ctx, problem, result)
        return result

    backward = staticmethod(_backward)


InputGradients = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
"""Gradients of q, k, v, gamma and threshold."""


def input_gradients(
    problem: Problem,
    results: tuple[Tensor | None, ...],
    grads: Sequence[Tensor | None],
    needs: Sequence[bool],
) -> InputGradients:
    """Run a backward pass.

    Args:
        problem: The call.
        results: `Outputs` of the forward pass; None for those that the pass does not read.
        grads: Gradients of the output, the row sums and the sums of w log w.
        needs: Whether gamma and threshold have a gradient.
    """
    out, row_sum, log_sum, count = results
    q, _, v, optional, _ = problem
    grad_out, grad_sum, grad_log = grads[:3]
    needs_gamma, needs_shift = needs
    if grad_out is None:
        grad_out = q.new_zeros((*q.shape[:3], v.shape[-1]))
    grad_sum, grad_log = row_gradients(grad_sum, grad_log)
    gradients = (
        last_contiguous(grad_out),
        out,
        None if optional.mask is None else count,
        grad_sum,
        grad_log,
        row_sum if problem.is_row_normalised else None,
    )
    if is_untraced(q):
        run_backward = host().run_backward
        result = run_backward.backward(problem, run_backward.Gradients(*gradients), needs_shift)
    else:
        operator = torch.ops.reluformer.rectified_attention_backward.default
        result = operator(*flatten(problem), *gradients, needs_shift)
    dq, dk, dv, row_dot, shift = result
    d_gamma = d_threshold = None
    if needs_gamma:
        statistics = (row_dot, row_sum, log_sum)
        d_gamma = gradient_of_gamma(problem, statistics, RowGradients(grad_sum, grad_log))
    if needs_shift:
        assert optional.threshold is not None
        d_threshold = -shift.to(optional.threshold.dtype)
    return dq, dk, dv, d_gamma, d_threshold


def recomputed_gradients(
    problem: Problem, grads: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """`input_gradients` from plain operations, which can be differentiated again."""
    grad_out, grad_sum, grad_log = grads[:3]
    q, k, v, optional, settings = problem
    if problem.is_packed or settings.dropout_p > 0:
        raise UserError(
            "second derivatives with dropout or packed sequences need impl='reference', "
            "got impl='triton'"
        )
    mask = None if optional.mask is None else optional.mask.bool()
    visibility = Visibility(mask, settings.causal, optional.key_lengths, settings.window or None)
    rule = Rectified(
        settings.gamma_value if optional.gamma is None else optional.gamma,
        settings.length_exponent,
        settings.power,
        settings.threshold_value if optional.threshold is None else optional.threshold,
        row_normalise=settings.row_normalise or None,
    )
    call = Call(q, k, v, visibility, settings.scale)
    return recompute.gradients(call, rule, (grad_out, *row_gradients(grad_sum, grad_log)))


def gradient_of_gamma(
    problem: Problem, statistics: tuple[Any, Any, Any], grads: RowGradients
) -> Tensor:  # fmt: skip
    """`gamma_gradient` of a call; statistics are dO.O, row sums and sums of w log w."""
    gamma, settings = problem.optional.gamma, problem.settings
    assert gamma is not None
    return gamma_gradient(
        gamma, *statistics, grads, settings.row_normalise, settings.entropy_every
    )  # fmt: skip


def row_gradients(
    grad_sum: Tensor | None, grad_log: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of row statistics, contiguous; None for absent ones, which may arrive empty.

    The kernels take the gradient of sums of w log w only together with that of row sums.
    """
    if grad_sum is not None and not grad_sum.numel():
        grad_sum = None
    if grad_log is not None and not grad_log.numel():
        grad_log = None
    if grad_sum is None and grad_log is not None:
        grad_sum = torch.zeros_like(grad_log)
    return (
        None if grad_sum is None else grad_sum.contiguous(),
        None if grad_log is None else grad_log.contiguous(),
    )


# Implementations of the registered operators.


def _filled(q: Tensor, values: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """The values with empty tensors for None: operators return tensors only."""
    return tuple(q.new_empty(0, dtype=torch.float32) if t is None else t for t in values)


def _for_kernels(problem: Problem) -> Problem:
    """The problem with a bool mask as bytes."""
    mask = problem.optional.mask
    if mask is None or mask.dtype != torch.bool:
        return problem
    return problem._replace(optional=problem.optional._replace(mask=mask.view(torch.uint8)))


def _run(*arguments: Any) -> tuple[Tensor, ...]:
    problem, (statistics,) = unflatten(arguments)
    problem = _for_kernels(problem)
    return _filled(problem.q, host().run_forward.forward(problem, statistics))


def _run_backward(*arguments: Any) -> tuple[Tensor, ...]:
    problem, (*gradients, needs_shift) = unflatten(arguments)
    problem = _for_kernels(problem)
    run_backward = host().run_backward
    grads = run_backward.Gradients(*gradients)
    return _filled(problem.q, run_backward.backward(problem, grads, needs_shift))


def _run_pages(*arguments: Any) -> Tensor:
    problem, (table,) = unflatten(arguments)
    result: Tensor = host().run_decode.decode_pages(problem, table)
    return result


def _fake(*arguments: Any) -> tuple[Tensor, ...]:
    problem, (statistics,) = unflatten(arguments)
    q, packed = problem.q, problem.is_packed
    computed = (statistics >= 1, statistics >= 2, problem.optional.mask is not None)
    rows = [row_values(q, packed=packed) if each else None for each in computed]
    return empty_heads(q, problem.v.shape[-1]), *_filled(q, rows)


def _fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
    problem, (_, out, *_, needs_shift) = unflatten(arguments)
    q, k, v = problem.q, problem.k, problem.v
    row_dot = None if out is None else row_values(q, packed=problem.is_packed)
    shift = q.new_empty(q.shape[1], dtype=torch.float32) if needs_shift else None
    grads = [empty_heads(tensor, tensor.shape[-1]) for tensor in (q, k, v)]
    return *grads, *_filled(q, (row_dot, shift))


def _fake_pages(*arguments: Any) -> Tensor:
    problem, _ = unflatten(arguments)
    return empty_heads(problem.q, problem.v.shape[-1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
    problem, _ = unflatten(inputs)
    _save(ctx, problem, output)


for _name, _function, _fake_function in (
    ("rectified_attention", _run, _fake),
    ("rectified_attention_backward", _run_backward, _fake_backward),
    ("paged_attention", _run_pages, _fake_pages),
):
    _library.impl(  # type: ignore[no-untyped-call]
        _name, _function, "CompositeExplicitAutograd"
    )
    torch.library.register_fake(f"reluformer::{_name}", _fake_function, lib=_library)
torch.library.register_autograd(
    "reluformer::rectified_attention", _backward, setup_context=_setup_context, lib=_library
)
