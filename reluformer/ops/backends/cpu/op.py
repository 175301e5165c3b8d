"""Rectified attention on the CPU: native kernels where they are built, plain torch elsewhere.

Without softmax a tile needs no running maximum and no rescaling: its product with the values is
added to the output. `plan` explains the factorisation that both paths share.

The kernels of `native` are faster. Plain torch (`tables`) runs the remaining calls: dropout,
float64 and sums of w ln w.
"""

from typing import Any

import torch
from torch import Tensor

from reluformer.ops.backends import recompute, reference
from reluformer.ops.backends.cpu import tables, tiles
from reluformer.ops.backends.cpu.native import calls as native
from reluformer.ops.backends.cpu.plan import Plan, make_plan
from reluformer.ops.backends.gamma_gradient import RowGradients, gamma_gradient
from reluformer.ops.backends.torch_state import needs_plain_backward
from reluformer.ops.call import Call, KernelResult
from reluformer.ops.hidden import has_nonfinite
from reluformer.ops.rule import Rectified


def why_not(call: Call, rule: Rectified) -> str | None:
    """One clause that says why this backend cannot run the call, or None if it can."""
    if call.q.device.type != "cpu":
        return f"it needs CPU tensors, and q is on {call.q.device.type}"
    if call.q.dtype not in tiles.ROWS:
        return f"it takes float32, float64 or bfloat16, got {call.q.dtype}"
    if not call.scale > 0:
        return f"scale must be positive, got {call.scale}"
    if call.packing is not None:
        return "it takes no packed sequences"
    if torch.compiler.is_compiling():
        return "its loops are not for compilers"
    return None


def attend(call: Call, rule: Rectified) -> KernelResult:
    """Attention with weights max(s - threshold, 0)^power / (gamma (n / 2)^length_exponent).

    q, k and v are float32, float64 or bfloat16. Row sums are float32, float64 for float64 inputs.
    In bfloat16 a NaN score counts as zero.
    """
    if torch.is_autocast_enabled("cpu"):
        # Autocast would round float32 products to half precision.
        with torch.autocast("cpu", enabled=False):
            return attend(call, rule)
    plan = make_plan(call, rule)
    if call.q.dtype == torch.bfloat16 and _needs_float32(plan, rule):
        return _in_float32(call, rule)
    gamma = rule.gamma if isinstance(rule.gamma, Tensor) else None
    threshold = rule.threshold if isinstance(rule.threshold, Tensor) else None
    inputs = (plan, call.q, call.k, call.v, gamma, threshold)
    results: tuple[Any, ...]
    if not plan.needs_grad:
        forward = native.forward if plan.is_native else tables.forward
        results = forward(*inputs)
    elif plan.is_native:
        # No functorch wrappers are around, which torch's own `apply` would unwrap.
        results = _apply(*inputs)
    else:
        results = _Attention.apply(*inputs)  # type: ignore[no-untyped-call]
    if results[-1] and has_nonfinite(call.k, call.v):
        return _exact(call, rule)
    return KernelResult(results[0], results[1] if call.return_sums else None, results[2])


def _needs_float32(plan: Plan, rule: Rectified) -> bool:
    """Whether bfloat16 would not be accurate enough.

    Tables in plain torch round scores, and the eighth power multiplies that error by eight. The
    gradients of a threshold and of row-normalised weights are sums whose terms may cancel. Native
    kernels decide themselves, see `Plan.keeps_exact`.
    """
    if plan.is_native:
        return False
    sums = rule.row_normalise is not None or isinstance(rule.threshold, Tensor)
    return rule.power > 2 or (plan.needs_grad and sums)


def _in_float32(call: Call, rule: Rectified) -> KernelResult:
    """The result of a bfloat16 call computed in float32."""
    wide = call._replace(q=call.q.float(), k=call.k.float(), v=call.v.float())
    result = attend(wide, rule)
    return result._replace(output=result.output.to(call.q.dtype))


def _exact(call: Call, rule: Rectified) -> KernelResult:
    """The result by plain operations, in which hidden NaN and infinity have no effect."""
    kept = None
    if call.dropout_p > 0:
        kept = call.q.new_empty(*call.q.shape[:3], call.k.shape[2]).detach()
        kept = kept.bernoulli_(1 - call.dropout_p).div_(1 - call.dropout_p)
    output, row_sum, log_sum = reference.rectified(call, rule, kept)
    statistics = call.statistics
    return KernelResult(
        output, row_sum if statistics >= 1 else None, log_sum if statistics >= 2 else None
    )


class _Attention(torch.autograd.Function):
    """q [B, H, Tq, D], k and v [B, Hkv, Tk, .], gamma and threshold [H] or None."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gamma: Tensor | None,
        threshold: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, bool]:
        ctx.plan = plan
        forward = native.forward if plan.is_native else tables.forward
        results = forward(plan, q, k, v, gamma, threshold)
        output, row_sum, log_sum, ctx.factor, x, kept, exact, is_spoilt = results
        ctx.set_materialize_grads(False)
        if ctx.needs_input_grad[4] or plan.row_normalise:
            saved = output if exact is None else exact
            ctx.save_for_backward(q, k, v, gamma, threshold, x, kept, saved, row_sum, log_sum)
        else:
            ctx.save_for_backward(q, k, v, gamma, threshold, x, kept)
        return output, row_sum, log_sum, is_spoilt

    @staticmethod
    def backward(
        ctx: Any,
        grad: Tensor | None,
        grad_sum: Tensor | None,
        grad_log: Tensor | None,
        _is_spoilt: None,
    ) -> tuple[Tensor | None, ...]:
        q, k, v, gamma, threshold, x, kept, *results = ctx.saved_tensors
        if needs_plain_backward(grad, grad_sum, grad_log):
            return None, *_recompute(ctx, (grad, grad_sum, grad_log))
        output, sums, logs = results or (None, None, None)
        plan = ctx.plan
        if grad is None:
            grad = q.new_zeros((*q.shape[:-1], v.shape[-1]))
        rows = tables.Incoming(grad, grad_sum, grad_log, ctx.factor, output, sums)
        if plan.is_native:
            # Row-normalised gradients of a threshold are sums that a rounded output would spoil.
            is_rounded = q.dtype == torch.bfloat16 and plan.row_normalise and not plan.keeps_exact
            needs_dots = any(ctx.needs_input_grad[4 : 6 if is_rounded else 5])
            gradients = native.backward(plan, q, k, v, threshold, rows, needs_dots)
        else:
            with torch.autocast("cpu", enabled=False):
                gradients = tables.backward(plan, q, k, v, threshold, rows, x, kept)
        dq, dk, dv, d_offset, row_dot, is_spoilt = gradients
        if is_spoilt and has_nonfinite(k, v):
            return None, *_recompute(ctx, (grad, grad_sum, grad_log))
        d_gamma = d_threshold = None
        if ctx.needs_input_grad[4]:
            assert row_dot is not None
            grads = RowGradients(grad_sum, grad_log)
            d_gamma = gamma_gradient(gamma, row_dot, sums, logs, grads, plan.row_normalise)
        if ctx.needs_input_grad[5]:
            assert d_offset is not None
            d_threshold = (-d_offset.sum(0) / plan.scale).to(threshold.dtype)
        return None, dq, dk, dv, d_gamma, d_threshold


def _recompute(ctx: Any, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, gamma and threshold from plain operations."""
    q, k, v, gamma, threshold, _, kept, *_ = ctx.saved_tensors
    plan: Plan = ctx.plan
    call = Call(q, k, v, plan.visibility, plan.scale * plan.unit)
    rule = Rectified(
        plan.gamma if gamma is None else gamma, plan.length_exponent, plan.power,
        plan.threshold if threshold is None else threshold,
        row_normalise=plan.row_normalise or None,
    )  # fmt: skip
    if kept is not None:
        kept = kept.view(*q.shape[:3], plan.keys)
    return recompute.gradients(call, rule, grads, kept)


_apply: Any = super(torch.autograd.Function, _Attention).apply
