"""The reference backend: readable torch operations for every attention on any device."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from reluformer.ops import hidden
from reluformer.ops.call import AttentionResult, Call, KernelResult
from reluformer.ops.definition import Attention
from reluformer.ops.memory import Scores, Weigh, hide, read
from reluformer.ops.rule import Rectified
from reluformer.ops.stats import RowSums, row_sums, sum_of_w_log_w, summarise


def why_not(attention: Attention, call: Call) -> str | None:
    """None: the reference runs every call."""
    return None


def run(attention: Attention, call: Call, options: Mapping[str, Any]) -> AttentionResult:
    """Scores, weights, output, output transform: the definition that every backend must match.

    Half-precision inputs are computed in float32; the output has the dtype of the input.
    """
    with _no_autocast(call.q.device):
        return _run(attention, bias_as_mask(call), options)


def rectified(call: Call, rule: Rectified, kept: Tensor | None = None) -> KernelResult:
    """The result of a fused kernel in plain operations, which any transform differentiates.

    kept is the dropout mask divided by 1 - p, [B, H, Tq, Tk]; without it there is no dropout.
    """
    with _no_autocast(call.q.device):
        q, k, v = _each_head(call)
        visible = call.visibility.table(q.shape[2], k.shape[2], q.device)
        v, seen_nan = _screened(call, v, visible)
        scores = score(call, q, k, visible)
        weights = hide(rule(scores), visible)
        unnormalised = _unnormalised(scores, rule)
        summed = weights if unnormalised is None else unnormalised
        output = (weights if kept is None else weights * kept) @ v
        output = output if seen_nan is None else output + seen_nan
        return KernelResult(output.to(call.q.dtype), summed.sum(dim=-1), sum_of_w_log_w(summed))


def _each_head(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in at least float32, with one key and value head for each query head."""
    dtype = torch.promote_types(call.q.dtype, torch.float32)
    q, k, v = (tensor.to(dtype) for tensor in (call.q, call.k, call.v))
    # Query heads h of one group share a key/value head: [B, Hkv, ...] becomes [B, H, ...].
    if call.groups > 1:
        k, v = (tensor.repeat_interleave(call.groups, dim=1) for tensor in (k, v))
    return q, k, v


def bias_as_mask(call: Call) -> Call:
    """The call with keys whose bias is -inf hidden by the mask; their bias is 0."""
    bias, rules = call.bias, call.visibility
    if bias is None or not hidden.may_be_nonfinite(bias):
        return call
    is_hidden = bias == -torch.inf
    mask = ~is_hidden if rules.mask is None else rules.mask & ~is_hidden
    bias = bias.masked_fill(is_hidden, 0.0)
    return call._replace(visibility=replace(rules, mask=mask), bias=bias)


def _run(attention: Attention, call: Call, options: Mapping[str, Any]) -> AttentionResult:
    q, k, v = _each_head(call)
    visible = call.visibility.table(q.shape[2], k.shape[2], q.device)
    v, seen_nan = _screened(call, v, visible)
    if attention.halves:
        first, second = (
            score(call, half_q, half_k, visible, cosine=attention.cosine)
            for half_q, half_k in zip(q.chunk(2, dim=-1), k.chunk(2, dim=-1), strict=True)
        )
        weigh = attention.weigh_with({**options, "second": second})
    else:
        first = score(call, q, k, visible, cosine=attention.cosine)
        weigh = attention.weigh_with(options)
    output, weights = read(first, v, weigh, call.dropout_p)
    if seen_nan is not None:
        output = output + seen_nan
    output = attention.transform_output(output, options)
    stats = sums = None
    if call.return_stats or call.return_sums:
        unnormalised = _unnormalised(first, weigh)
        stats = summarise(weights, visible, unnormalised) if call.return_stats else None
        summed = weights if unnormalised is None else unnormalised
        sums = _sums(summed, call) if call.return_sums else None
    return AttentionResult(
        output.to(call.q.dtype), weights if call.return_weights else None, stats, sums
    )


def _screened(call: Call, v: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Finite values, and NaN [B, H, Tq, Dv] for rows that see others; None if all are finite."""
    if visible is None or not v.numel() or not hidden.may_be_nonfinite(v):
        return v, None
    if call.visibility.mask is not None:
        seen = hidden.nan_where_seen(visible, v)
    else:
        # Without a mask a row sees consecutive keys, and needs no product of the size of `visible`.
        bounds = call.visibility.bounds(call.q.shape[2], v.shape[2], v.device)
        seen = hidden.nan_in_bounds(*bounds, v)
    return hidden.finite(v), seen.to(v.dtype)


def _unnormalised(scores: Scores, weigh: Weigh) -> Tensor | None:
    """The weights [B, H, Tq, Tk] before row normalisation; None if the rule has none."""
    if not isinstance(weigh, Rectified) or weigh.row_normalise is None:
        return None
    return hide(replace(weigh, row_normalise=None)(scores), scores.visible)


def _sums(weights: Tensor, call: Call) -> RowSums:
    """The requested row sums of weights [B, H, Tq, Tk]."""
    size = weights.abs()
    row_sum = size.sum(dim=-1)
    log_sum = sum_of_w_log_w(size) if call.return_sums == "entropy" else None
    n = call.visibility.count(weights.shape[-2], weights.shape[-1], weights.device)
    return row_sums(row_sum, log_sum, n, call.entropy_every)


def score(
    call: Call, q: Tensor, k: Tensor, visible: Tensor | None, *, cosine: bool = False
) -> Scores:
    """Scores [B, H, Tq, Tk] of q [B, H, Tq, D] and k [B, H, Tk, D], zero where hidden."""
    nan = None
    if visible is not None and hidden.may_be_nonfinite(k):
        # Hidden scores are dropped, but the gradient of q is a product with all keys.
        nan, k = hidden.nan_keys(k), hidden.finite(k)
    if cosine:
        q, k = functional.normalize(q, dim=-1), functional.normalize(k, dim=-1)
    values = (q * call.scale) @ k.transpose(-2, -1)
    if nan is not None:
        values = values + nan.to(values.dtype)
    if call.bias is not None:
        values = values + call.bias
    return Scores(hide(values, visible), visible, q.shape[-1])


def _no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Context in which autocast does not round the scores to half precision."""
    # Compared by name, because torch.compile cannot trace `torch.amp.is_autocast_available`.
    if device.type == "meta":
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
