"""Rectified rules on fused kernels: the bridge from a call to `triton.op` and `cpu`.

A kernel takes w = max(s - threshold, 0)^power / (gamma (n/2)^length_exponent), and rows divided by
their sums; whatever an attention does around that rule (cosines before, norms and gates after)
happens here, as in the reference.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from reluformer.ops.backends.cpu import op
from reluformer.ops.call import AttentionResult, Call
from reluformer.ops.definition import Attention
from reluformer.ops.rule import Rectified
from reluformer.ops.stats import row_sums

Kernel = Callable[..., tuple[Tensor, Tensor | None, Tensor | None]]

_STATISTICS = {None: 0, "row_sum": 1, "entropy": 2}
"""The kernels' level for each request for sums."""


def why_not(
    supports: Callable[[Call, Rectified], str | None],
    attention: Attention,
    call: Call,
    options: Mapping[str, Any],
) -> str | None:
    """Why this call cannot run on a fused kernel, or None; `supports` asks the kernel itself."""
    rule = _rule(attention, options)
    if rule is None:
        return "fused kernels run rectified rules only"
    if call.return_weights or call.return_stats:
        return "fused kernels return neither weights nor statistics beyond `return_sums`"
    if call.bias is not None:
        return "fused kernels take no score bias"
    if rule.negative_slope != 0:
        return f"fused kernels take no negative slope, got {rule.negative_slope}"
    return supports(call, rule)


def run(
    kernel: Callable[[Call], Kernel], attention: Attention, call: Call, options: Mapping[str, Any]
) -> AttentionResult:
    """Run the rule on the kernel that `kernel` gives for the call, then the attention's finish."""
    rule = _rule(attention, options)
    assert rule is not None
    q, k = call.q, call.k
    wide = torch.promote_types(q.dtype, torch.float32)
    if attention.cosine:
        q, k = (functional.normalize(t.to(wide), dim=-1).to(t.dtype) for t in (q, k))
    heads = q.shape[1]
    output, row_sum, log_sum = kernel(call)(
        q,
        k,
        call.v,
        scale=call.scale,
        gamma=_each_head(rule.gamma, heads, wide),
        length_exponent=rule.length_exponent,
        power=rule.power,
        threshold=_each_head(rule.threshold, heads, wide),
        causal=call.visibility.causal,
        window=call.visibility.window,
        key_lengths=call.visibility.key_lengths,
        mask=call.visibility.mask,
        dropout_p=call.dropout_p,
        statistics=_STATISTICS[call.return_sums],
        row_normalise=rule.row_normalise,
    )
    sums = None
    if call.return_sums is not None:
        assert row_sum is not None
        n = call.visibility.count(q.shape[2], k.shape[2], q.device)
        sums = row_sums(row_sum, log_sum, n, call.entropy_every)
    if attention.output_transform is not None:
        # Norms and gates are computed in float32, as in the reference.
        output = attention.transform_output(output.to(wide), options)
    return AttentionResult(output.to(call.q.dtype), None, None, sums)


def triton_supports(call: Call, rule: Rectified) -> str | None:
    """Why the Triton kernels cannot run this call, or None."""
    from reluformer.ops.backends.triton.op import supports

    return supports(call.q, call.k, call.v, scale=call.scale, power=rule.power)


def triton_kernel() -> Kernel:
    """The Triton kernels' entry point."""
    from reluformer.ops.backends.triton.op import rectified_attention

    return rectified_attention


def cpu_supports(call: Call, rule: Rectified) -> str | None:
    """Why the CPU path cannot run this call, or None."""
    return op.supports(call.q, scale=call.scale)


def cpu_kernel() -> Kernel:
    """The CPU path's entry point."""
    return op.rectified_attention


cpu_why_not = partial(why_not, cpu_supports)
# The CPU path makes all entropies; those of rows that are not sampled are hidden afterwards.
cpu_run = partial(run, lambda call: cpu_kernel())
triton_why_not = partial(why_not, triton_supports)
triton_run = partial(run, lambda call: partial(triton_kernel(), entropy_every=call.entropy_every))


def _rule(attention: Attention, options: Mapping[str, Any]) -> Rectified | None:
    weigh = attention.weigh_with(options)
    return weigh if isinstance(weigh, Rectified) else None


def _each_head(value: float | Tensor, heads: int, dtype: torch.dtype) -> float | Tensor:
    """Numbers as they are, tensors as [H]."""
    if not isinstance(value, Tensor):
        return value
    value = value.to(dtype)
    return value if value.shape == (heads,) else value.expand(heads)
