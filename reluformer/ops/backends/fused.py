"""The parts of an attention around a fused kernel, as the reference computes them.

A kernel takes w = max(s - threshold, 0)^power / (gamma (n/2)^length_exponent) with optional row
normalisation. Cosine scores before it, and row statistics, norms and gates after it, are here.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from reluformer.ops.call import AttentionResult, Call, KernelResult
from reluformer.ops.definition import Attention
from reluformer.ops.rule import Rectified
from reluformer.ops.stats import row_sums


def with_cosines(attention: Attention, call: Call) -> Call:
    """The call with q and k of length 1 if the attention scores cosines."""
    if not attention.cosine:
        return call
    return call._replace(q=_of_length_one(call.q), k=_of_length_one(call.k))


def _of_length_one(vectors: Tensor) -> Tensor:
    """Vectors [..., D] divided by their lengths, in float32 at least; NaN for non-finite ones.

    Those have gradient 0, so that a hidden one spoils nothing.
    """
    is_bad = ~vectors.isfinite().all(dim=-1, keepdim=True)
    wide = torch.promote_types(vectors.dtype, torch.float32)
    finite = vectors.masked_fill(is_bad, 0).to(wide)
    unit = functional.normalize(finite, dim=-1).to(vectors.dtype)
    return unit.masked_fill(is_bad, torch.nan)


def per_head_rule(rule: Rectified, q: Tensor) -> Rectified:
    """The rule with gamma and threshold as numbers or contiguous tensors [H], at least float32."""
    gamma, threshold = rule.gamma, rule.threshold
    if isinstance(gamma, Tensor):
        gamma = _each_head(gamma, q)
    if isinstance(threshold, Tensor):
        threshold = _each_head(threshold, q)
    if gamma is rule.gamma and threshold is rule.threshold:
        return rule
    return replace(rule, gamma=gamma, threshold=threshold)


def _each_head(value: Tensor, q: Tensor) -> Tensor:
    """[H] on q's device, at least float32, from one value or one per head."""
    dtype, heads = torch.promote_types(q.dtype, torch.float32), q.shape[1]
    if value.dtype == dtype and value.shape == (heads,) and value.is_contiguous():
        return value
    return value.to(q.device, dtype).expand(heads).contiguous()


def finish(
    attention: Attention, call: Call, options: Mapping[str, Any], result: KernelResult
) -> AttentionResult:
    """The attention's result from the kernel's: row statistics, output transform, dtype of q."""
    output, row_sum, log_sum = result
    sums = None
    if row_sum is not None:
        n = call.visibility.count(call.q.shape[2], call.k.shape[2], call.q.device)
        sums = row_sums(row_sum, log_sum, n, call.entropy_every)
    if attention.output_transform is not None:
        # Norms and gates are computed in float32, as in the reference.
        wide = torch.promote_types(call.q.dtype, torch.float32)
        output = attention.transform_output(output.to(wide), options)
    if output.dtype != call.q.dtype:
        output = output.to(call.q.dtype)
    return AttentionResult(output, None, None, sums)
