"""The kernels as differentiable PyTorch operators.

`reluformer::rectified_attention` is what a compiler sees: opaque (no graph break), with a fake and
an autograd formula. Without a compiler or a dispatch mode around, `attend` leaves the dispatcher
out and runs the same formula in a plain autograd function, which costs a tenth of the time on the
host. Triton itself is imported at the first call.
"""

from functools import cache
from typing import Any

import torch

from reluformer.ops.backends.gamma_gradient import RowGradients, gamma_gradient
from reluformer.ops.backends.torch_state import is_untraced, needs_grad
from reluformer.ops.backends.triton.layout import empty_heads, last_contiguous, row_values

_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? gamma, Tensor? threshold, Tensor? key_lengths, "
    "Tensor? mask, Tensor? cu_q, Tensor? cu_k, Tensor? seed"
)
_NUMBERS = (
    "float scale, float gamma_value, float threshold_value, float length_exponent, int power, "
    "bool causal, int window, float dropout_p, SymInt max_q, SymInt max_k, "
    "int entropy_every, float row_normalise"
)
# Of the arguments of an operator, the fields of a `Problem`.
_FIELDS = 22

_library = torch.library.Library("reluformer", "FRAGMENT")
for _schema in (
    f"rectified_attention({_TENSORS}, {_NUMBERS}, int statistics)"
    " -> (Tensor out, Tensor row_sum, Tensor log_sum, Tensor count)",
    "rectified_attention_backward(Tensor? out, Tensor? count, Tensor grad_out, Tensor? grad_sum,"
    f" Tensor? grad_log, Tensor? row_sum, {_TENSORS}, {_NUMBERS}, bool need_shift)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor row_dot, Tensor shift)",
    "paged_attention(Tensor q, Tensor keys, Tensor values, Tensor table, Tensor lengths,"
    " Tensor? key_min, Tensor? key_max, Tensor? gamma, Tensor? threshold, float scale,"
    " float gamma_value, float threshold_value, float length_exponent, int power, bool causal,"
    " float row_normalise) -> Tensor",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def attend(*arguments):
    """The arguments of the operator; (out, row sums, sums of w log w, counts), None or empty for
    what was not asked for. To divide by row sums, ask for them."""
    if not is_untraced(arguments[0]):
        return torch.ops.reluformer.rectified_attention.default(*arguments)
    if needs_grad(*arguments[:5]):
        return _Attention.apply(*arguments)
    return _forward_host().forward(
        _forward_host().Problem(*arguments[:_FIELDS]), arguments[_FIELDS]
    )


def attend_pages(*arguments):
    """The arguments of the operator for pages; the output."""
    if not is_untraced(arguments[0]):
        return torch.ops.reluformer.paged_attention.default(*arguments)
    return _run_pages(*arguments)


@cache
def _forward_host() -> Any:
    from reluformer.ops.backends.triton import run_forward

    return run_forward


@cache
def _backward_host() -> Any:
    from reluformer.ops.backends.triton import run_backward

    return run_backward


def _save(ctx, inputs, output):
    out, row_sum, log_sum, count = output
    # Only the gradients of gamma and of divided rows need results of the forward pass.
    need_gamma, divided = ctx.needs_input_grad[3], inputs[_FIELDS - 1] > 0
    kept = (out, row_sum) if need_gamma or divided else (None, None)
    if count is not None:
        ctx.mark_non_differentiable(count)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:10], *kept, log_sum if need_gamma else None, count)
    ctx.numbers = inputs[10:_FIELDS]


def _backward(ctx, grad_out, grad_sum, grad_log, _):
    *tensors, out, row_sum, log_sum, count = ctx.saved_tensors
    q, _, v, gamma, threshold, _, mask = tensors[:7]
    every, epsilon = ctx.numbers[-2:]
    need_gamma, need_shift = ctx.needs_input_grad[3:5]
    if grad_out is None:
        grad_out = q.new_zeros((*q.shape[:3], v.shape[-1]))
    if grad_sum is not None or grad_log is not None:
        some = grad_sum if grad_sum is not None else grad_log
        grad_sum = torch.zeros_like(some) if grad_sum is None else grad_sum.contiguous()
        grad_log = None if grad_log is None or not grad_log.numel() else grad_log.contiguous()
        grad_sum = grad_sum if grad_sum.numel() else None
    arguments = (
        out, None if mask is None else count, last_contiguous(grad_out), grad_sum, grad_log,
        row_sum if epsilon > 0 else None, *tensors, *ctx.numbers, need_shift,
    )  # fmt: skip
    if is_untraced(q):
        dq, dk, dv, row_dot, shift = _run_backward(*arguments)
    else:
        found = torch.ops.reluformer.rectified_attention_backward.default(*arguments)
        dq, dk, dv, row_dot, shift = found
    d_gamma = d_threshold = None
    if need_gamma:
        grads = RowGradients(grad_sum, grad_log)
        d_gamma = gamma_gradient(gamma, row_dot, row_sum, log_sum, grads, epsilon, every)
    if need_shift:
        d_threshold = -shift.to(threshold.dtype)
    return dq, dk, dv, d_gamma, d_threshold, *([None] * (_FIELDS - 4))


class _Attention(torch.autograd.Function):
    """The operator with its formula, without the dispatcher."""

    @staticmethod
    def forward(ctx, *inputs):
        found = _forward_host().forward(_forward_host().Problem(*inputs[:_FIELDS]), inputs[_FIELDS])
        _save(ctx, inputs, found)
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        return _backward(ctx, *grads)


def _run(*arguments):
    found = _forward_host().forward(
        _forward_host().Problem(*arguments[:_FIELDS]), arguments[_FIELDS]
    )
    return _filled(arguments[0], found)


def _run_backward(out, count, grad_out, grad_sum, grad_log, row_sum, *rest):
    host = _backward_host()
    grads = host.Gradients(out, count, grad_out, grad_sum, grad_log, row_sum)
    return host.backward(host.Problem(*rest[:_FIELDS]), grads, rest[_FIELDS])


def _run_pages(
    q, keys, values, table, lengths, key_min, key_max, gamma, threshold, scale, gamma_value,
    threshold_value, length_exponent, power, causal, row_normalise,
):  # fmt: skip
    host = _forward_host()
    problem = host.Problem(
        q, keys, values, gamma, threshold, lengths, None, None, None, None, scale, gamma_value,
        threshold_value, length_exponent, power, causal, 0, 0.0, q.shape[2],
        table.shape[1] * keys.shape[2], row_normalise=row_normalise,
    )  # fmt: skip
    return host.paged(problem, table, key_min, key_max)


def _filled(q, found):
    """Operators return tensors: an empty one for what is not there."""
    return tuple(q.new_empty(0, dtype=torch.float32) if each is None else each for each in found)


def _fake(q, k, v, gamma, threshold, key_lengths, mask, cu_q, cu_k, seed, *rest):
    statistics = rest[-1]
    wanted = (statistics >= 1, statistics >= 2, mask is not None)
    packed = cu_q is not None
    rows = (row_values(q, packed=packed) if each else None for each in wanted)
    return empty_heads(q, v.shape[-1]), *_filled(q, rows)


def _fake_pages(q, keys, values, *rest):
    return empty_heads(q, values.shape[-1])


def _fake_backward(out, count, grad_out, grad_sum, grad_log, row_sum, q, k, v, *rest):
    packed = rest[4] is not None
    row_dot = None if out is None else row_values(q, packed=packed)
    shift = q.new_empty(q.shape[1], dtype=torch.float32) if rest[-1] else None
    made = (empty_heads(each, each.shape[-1]) for each in (q, k, v))
    return *made, *_filled(q, (row_dot, shift))


_library.impl("rectified_attention", _run, "CompositeExplicitAutograd")
_library.impl("paged_attention", _run_pages, "CompositeExplicitAutograd")
_library.impl(
    "rectified_attention_backward",
    lambda *arguments: _filled(arguments[2], _run_backward(*arguments)),
    "CompositeExplicitAutograd",
)
torch.library.register_fake("reluformer::rectified_attention", _fake, lib=_library)
torch.library.register_fake(
    "reluformer::rectified_attention_backward", _fake_backward, lib=_library
)
torch.library.register_fake("reluformer::paged_attention", _fake_pages, lib=_library)
torch.library.register_autograd(
    "reluformer::rectified_attention", _backward, setup_context=_save, lib=_library
)
