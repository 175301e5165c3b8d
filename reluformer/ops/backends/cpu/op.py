"""Rectified attention on the CPU: compiled kernels where built, else plain torch.

Without softmax a tile needs no running maximum and no rescaling: its product with the values is
simply added. As on the GPU no product knows scale or normaliser; with x = max(q.k - t, 0) a weight
is C_i x^power and C_i, divided by the row's sum where the rule divides, multiplies each output row
once.

Few query rows (decoding) are two products over whole tables. So are short sequences in training,
whose x the backward pass reads again, and calls with a mask or dropout, which are quadratic in the
length by themselves. All others go by tiles that stay in the cache, with memory linear in the
lengths: there padding is rows of zeros, which weigh nothing, and the causal edge is a triangle.

The kernels of `reluformer.ops.backends.cpu.native` do the same without tables, faster. They run what they
support, asked beforehand; masks, dropout, float64 and sums of w log w stay here.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from reluformer.ops.backends.cpu import tiles
from reluformer.ops.backends.cpu.native import calls as native
from reluformer.ops.backends.gamma_gradient import RowGradients, gamma_gradient
from reluformer.ops.backends.torch_state import needs_grad
from reluformer.ops.call import Call, KernelResult
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
    q, k, v, scale = call.q, call.k, call.v, call.scale
    if rule.power > 2:
        # High powers of unscaled products could overflow; a power of two changes no digit of q.
        unit = 2.0 ** round(math.log2(scale))
        q, scale = q * unit, scale / unit
    n_q, n_k = q.shape[2], k.shape[2]
    per_head = [
        value if isinstance(value, Tensor) else None for value in (rule.gamma, rule.threshold)
    ]
    trained = needs_grad(q, k, v, *per_head)
    short = n_q < tiles.MANY_ROWS or (trained and n_q * n_k <= tiles.SHORT)
    masked = call.visibility.mask is not None or call.dropout_p > 0
    statistics = call.statistics
    compiled = native.supports(q, k, v, trained=trained, masked=masked, statistics=statistics)
    plan = tiles.Plan(
        scale,
        float(rule.gamma) if per_head[0] is None else 1.0,
        float(rule.threshold) if per_head[1] is None else 0.0,
        rule.length_exponent,
        rule.power,
        call.visibility,
        call.dropout_p,
        statistics if rule.row_normalise is None else max(statistics, 1),
        rule.row_normalise or 0.0,
        n_k,
        n_k - n_q,
        short or masked,
        trained,
        compiled,
    )
    with _no_autocast():
        if trained:
            found = _Attention.apply(plan, q, k, v, *per_head)  # type: ignore[no-untyped-call]
        else:
            found = _forward(plan, q, k, v, *per_head)[0]
    out, row_sum, log_sum = found
    return KernelResult(out, row_sum if statistics else None, log_sum)


def _no_autocast() -> AbstractContextManager[Any]:
    """Keeps autocast from rounding float32 products to half precision."""
    # Asked first: entering a context takes as long as a small product.
    if not torch.is_autocast_enabled("cpu"):
        return nullcontext()
    return torch.autocast("cpu", enabled=False)


def _forward(
    plan: tiles.Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma: Tensor | None,
    threshold: Tensor | None,
) -> tuple[tuple[Tensor, Tensor | None, Tensor | None], tuple[Any, ...]]:
    """Output, row sums and sums of w log w; then C, and x and what dropout kept if in one piece."""
    opening = _opening(plan, q, threshold)
    if plan.compiled:
        factor = _factor(plan, q, gamma, None)
        out, sums = native.forward(plan, q, k, v, opening, factor)
        return (out, sums, None), (factor, None, None)
    tables_q, tables_k, tables_v = _tables(plan, q, k, v, opening)
    sums = logs = x = kept = visible = None
    if plan.statistics:
        sums = torch.zeros(tables_q.shape[:3], dtype=_sum_dtype(q))
        logs = torch.zeros_like(sums) if plan.statistics > 1 else None
    if plan.whole:
        if plan.rules.mask is not None or plan.rules.key_lengths is not None:
            visible = plan.rules.table(q.shape[2], plan.keys, q.device)
        added = opening if _adds_later(plan, q) else None
        x = tiles.whole_scores(plan, tables_q, tables_k, visible, q.shape[1], added)
        weight = tiles.weigh(plan, x, sums, logs)
        if plan.dropout_p:
            kept = torch.empty_like(x).bernoulli_(1 - plan.dropout_p).div_(1 - plan.dropout_p)
            weight = weight * kept
        out = tiles.multiply(weight, tables_v)
    else:
        out = tiles.tiled(plan, tables_q, tables_k, tables_v, sums, logs)
    factor = _factor(plan, q, gamma, visible)
    if sums is not None:
        sums = sums.view(q.shape[:3])
        if logs is not None:
            logs = factor * (_log(factor) * sums + plan.power * logs.view(q.shape[:3]))
        sums = factor * sums
    out = out.view(*q.shape[:3], v.shape[-1]).mul_(_column(_divided(plan, factor, sums)))
    return (out, sums, logs), (factor, x, kept)


class _Attention(torch.autograd.Function):
    """q [B, H, Tq, D], k and v [B, Hkv, Tk, .], gamma and threshold [H] or None."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: tiles.Plan,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gamma: Tensor | None,
        threshold: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        results, (ctx.factor, x, kept) = _forward(plan, q, k, v, gamma, threshold)
        ctx.plan = plan
        needed = ctx.needs_input_grad[4] or plan.row_normalise
        ctx.save_for_backward(
            q, k, v, gamma, threshold, x, kept, *(results if needed else (None, None, None))
        )
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad: Tensor | None, grad_sum: Tensor | None, grad_log: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        q, k, v, gamma, threshold, x, kept, out, sums, logs = ctx.saved_tensors
        plan, factor, exact = ctx.plan, ctx.factor, _sum_dtype(q)
        if grad is None:
            grad = q.new_zeros((*q.shape[:-1], v.shape[-1]))
        ratio = _divided(plan, factor, sums)
        dot: Any = None if out is None else (out.to(exact) * grad.to(exact)).sum(-1)
        constant, slope = _row_terms(plan, factor, grad_sum, grad_log)
        if plan.row_normalise:
            # What arrives at a row's sum because the row is divided by it.
            through = -dot * ratio
            constant = through if constant is None else constant + through
        opening = _opening(plan, q, threshold)
        shift: Tensor | None
        if plan.compiled:
            dq, dk, dv, shift = native.backward(plan, q, k, v, opening, grad, ratio, constant)
        else:
            given = (grad, ratio, constant, slope)
            dq, dk, dv, shift = _by_tiles(plan, q, k, v, opening, given, x, kept)
        d_gamma = d_threshold = None
        if ctx.needs_input_grad[4]:
            grads = RowGradients(grad_sum, grad_log)
            d_gamma = gamma_gradient(gamma, dot, sums, logs, grads, plan.row_normalise)
        if ctx.needs_input_grad[5]:
            assert shift is not None
            d_threshold = (-shift.sum(0) / plan.scale).to(threshold.dtype)
        return None, dq, dk, dv, d_gamma, d_threshold


def _by_tiles(
    plan: tiles.Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    opening: Tensor | None,
    given: tuple[Tensor, Tensor | float, Tensor | None, Tensor | None],
    x: Tensor | None,
    kept: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k and v, and the sum of those of all scores [B, H] if there is an opening.

    given is the output's gradient, what multiplies its rows, and the rows' terms.
    """
    width, groups = q.shape[-1], q.shape[1] // k.shape[1]
    grad, ratio, *rows = given
    tables = _tables(plan, q, k, v, opening)
    scaled = _grouped((grad * _column(ratio)).to(q.dtype).contiguous(), groups)
    terms = [None if each is None else _grouped(each, groups).to(q.dtype) for each in rows]
    with _no_autocast():
        if plan.whole:
            assert x is not None
            dq, dk, dv = tiles.whole_gradients(plan, *tables, scaled, terms, x, kept)
        else:
            dq, dk, dv = tiles.tiled_gradients(plan, *tables, scaled, terms)
    shift = None
    if opening is not None:
        # Its column meets a one in every key, so what arrives there is the sum of dS.
        shift = dq[..., width].reshape(q.shape[:3]).sum(2, dtype=_sum_dtype(q))
    dq = dq[..., :width].to(q.dtype).reshape(q.shape)
    return dq, _like(dk[..., :width], k), _like(dv, v), shift


def _sum_dtype(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def _grouped(tensor: Tensor, groups: int) -> Tensor:
    """[B, H, Tq, ...] as [B * Hkv, G, Tq, ...]."""
    batch, heads = tensor.shape[:2]
    return tensor.reshape(batch * heads // groups, groups, *tensor.shape[2:])


def _like(tables: Tensor, other: Tensor) -> Tensor:
    """[B * Hkv, keys, width] in shape and type of the other, zeros for padding left out."""
    missing = other.shape[2] - tables.shape[1]
    if missing:
        tables = torch.nn.functional.pad(tables, (0, 0, 0, missing))
    return tables.to(other.dtype).reshape(other.shape)


def _tables(
    plan: tiles.Plan, q: Tensor, k: Tensor, v: Tensor, opening: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B * Hkv, G, Tq, D'], k and v [B * Hkv, Tk', .]: columns for the threshold, padding cut.

    For few rows k and v are as in memory, which may be [B, Hkv, Tk, .].
    """
    if opening is not None and not _adds_later(plan, q):
        q, k = _with_threshold(q, k, opening)
    groups = q.shape[1] // k.shape[1]
    if _few(plan, q):
        k, v = (
            each.flatten(0, 1)
            if each.shape[0] <= 1 or each.stride(0) == each.shape[1] * each.stride(1)
            else each
            for each in (k, v)
        )
        return _grouped(q, groups), k, v
    # Products of strided tables are slower than these copies.
    q, k, v = (each.contiguous() for each in (q, k, v))
    lengths = plan.rules.key_lengths
    if lengths is not None and not plan.whole:
        longest = max(0, min(int(lengths.max()), k.shape[2])) if len(lengths) else 0
        hidden = torch.arange(longest) >= lengths[:, None]
        k, v = (each[:, :, :longest].masked_fill(hidden[:, None, :, None], 0) for each in (k, v))
    return _grouped(q, groups), k.flatten(0, 1), v.flatten(0, 1)


def _few(plan: tiles.Plan, q: Tensor) -> bool:
    """Whether the call decodes: copies of k and v would take longer than what is done with them."""
    return q.shape[2] < tiles.MANY_ROWS and not plan.trained


def _adds_later(plan: tiles.Plan, q: Tensor) -> bool:
    """Whether the opening is added to finished scores, not in their product."""
    return _few(plan, q) and q.dtype != torch.bfloat16


def _opening(plan: tiles.Plan, q: Tensor, threshold: Tensor | None) -> Tensor | None:
    """-threshold / scale of each head, [H]; None without a threshold."""
    if threshold is None and not plan.threshold:
        return None
    exact = _sum_dtype(q)
    opening = torch.full((q.shape[1],), -plan.threshold / plan.scale, dtype=exact)
    return opening if threshold is None else opening - threshold.detach().to(exact) / plan.scale


def _with_threshold(q: Tensor, k: Tensor, opening: Tensor) -> tuple[Tensor, Tensor]:
    """q and k with columns whose product is the opening [H] of each head.

    The product adds it before it rounds, so that in bfloat16 too the sign, which gates the
    gradient, is that of the exact difference. Three parts hold a float32 in bfloat16.
    """
    rest, parts = opening, []
    for _ in range(3 if q.dtype == torch.bfloat16 else 1):
        parts.append(rest.to(q.dtype))
        rest = rest - parts[-1].to(rest.dtype)
    columns = torch.stack(parts, -1)[:, None].expand(*q.shape[:-1], len(parts))
    ones = torch.ones((*k.shape[:-1], len(parts)), dtype=k.dtype)
    return torch.cat([q, columns], -1), torch.cat([k, ones], -1)


def _factor(
    plan: tiles.Plan, q: Tensor, gamma: Tensor | None, visible: Tensor | None
) -> Tensor | float:
    """C_i, broadcastable to [B, H, Tq]; a row that sees nothing has no x to scale."""
    rows = q.shape[2]
    n = plan.rules.count(rows, plan.keys, q.device) if visible is None else visible.sum(-1)
    unit = plan.scale**plan.power / plan.gamma
    factor: Tensor | float
    if isinstance(n, int):
        factor = unit * (max(n, 1) / 2) ** -plan.length_exponent
    else:
        factor = unit * (n.clamp(min=1).to(_sum_dtype(q)) / 2) ** -plan.length_exponent
    if gamma is not None:
        factor = factor / gamma.detach().to(_sum_dtype(q))[:, None]
    return factor


def _divided(plan: tiles.Plan, factor: Tensor | float, sums: Tensor | None) -> Tensor | float:
    """C_i over the row's sum plus epsilon, [B, H, Tq], where the plan says so, else C_i."""
    if not plan.row_normalise:
        return factor
    assert sums is not None
    return factor / (sums + plan.row_normalise)


def _column(factor: Tensor | float) -> Tensor | float:
    """[..., 1] of a tensor."""
    return factor if isinstance(factor, float) else factor[..., None]


def _log(factor: Tensor | float) -> Tensor | float:
    return math.log(factor) if isinstance(factor, float) else factor.log()


def _row_terms(
    plan: tiles.Plan, factor: Tensor | float, grad_sum: Tensor | None, grad_log: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """What the statistics add to dL/dx before its slope: a constant, and a multiple of log x."""
    constant = None if grad_sum is None else grad_sum * factor
    if grad_log is None:
        return constant, None
    more = grad_log * factor * (1 + _log(factor))
    return more if constant is None else constant + more, grad_log * factor * plan.power
