"""Parts of an attention that add up: rectified weights know nothing of the other keys.

With weights c_i f(s_ij), the sum of f(s_ij) v_j over the keys can be taken part by part, in any
order, wherever the keys are; c_i, which needs the number of all keys that row i sees, multiplies
the total. No maximum or logarithm of a sum has to be merged. A rule that divides rows by their sums
(`Rectified.row_normalise`) also needs the sum of f(s_ij), which adds up in the same way: the division
comes once, behind both totals.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from reluformer.errors import UserError
from reluformer.ops.api import attend
from reluformer.ops.call import Call
from reluformer.ops.checks import check_attention, check_tensors
from reluformer.ops.definition import Attention
from reluformer.ops.family.table import ATTENTIONS, lookup
from reluformer.ops.rule import Rectified
from reluformer.ops.visibility import Visibility


def additive(name: str) -> Attention:
    """The attention called `name`, if its parts add up."""
    row = lookup(name)
    if row.rule is None:
        known = ", ".join(sorted(other for other, row in ATTENTIONS.items() if row.rule))
        raise UserError(
            f"{name} attention cannot be divided over ranks: only the outputs of rectified "
            f"attentions add up ({known})"
        )
    return row


def checked_call(
    row: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Mapping[str, Any],
    *,
    scale: float | None,
    causal: bool = False,
    key_lengths: Tensor | None = None,
    dropout_p: float = 0.0,
    return_stats: bool = False,
) -> Call:
    """The call on this rank's tensors, refused before anything is sent if it cannot be right."""
    check_tensors(q, k, v)
    if scale is None:
        scale = row.default_scale(q.shape[-1])
    visibility = Visibility(causal=causal, key_lengths=key_lengths)
    call = Call(q, k, v, visibility, scale, dropout_p=dropout_p, return_stats=return_stats)
    check_attention(row, call, options)
    return call


def rule_of(row: Attention, options: Mapping[str, Any]) -> Rectified:
    """The rule of an additive attention with its options."""
    rule = row.rectified(options)
    assert rule is not None
    return rule


def read(rule: Rectified, call: Call, impl: str) -> tuple[Tensor, ...]:
    """sum_j f(s_ij) v_j over the call's keys, [B, H, Tq, Dv]: the output without its scale c_i.

    If the rule divides by row sums, then also sum_j f(s_ij), [B, H, Tq, 1] in float32 or wider and
    before dropout.
    """
    q, k, v = call.q, call.k, call.v
    if q.dtype == torch.float16:
        # Not yet divided, sums over long contexts leave its range.
        q, k, v = q.float(), k.float(), v.float()
    call = call._replace(
        q=q, k=k, v=v, return_sums=None if rule.row_normalise is None else "row_sum"
    )
    options = {
        "length_exponent": 0.0,
        "power": rule.power,
        "threshold": rule.threshold,
        "negative_slope": rule.negative_slope,
    }
    result = attend(lookup("relu"), call, options, impl)
    if result.sums is None:
        return (result.output,)
    return result.output, result.sums.row_sum.unsqueeze(-1)


def combine(
    row: Attention,
    options: Mapping[str, Any],
    sums: tuple[Tensor, ...],
    n: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """The output [B, H, Tq, Dv] from what `read` sums, over all keys.

    n, the number of keys that a row sees in all, is broadcastable to [B, H, Tq].
    """
    rule = rule_of(row, options)
    output, *row_sum = sums
    scale = rule.scale_of(n.to(output.dtype).unsqueeze(-1))
    output = output * scale
    if rule.row_normalise is not None:
        output = output / (row_sum[0] * scale + rule.row_normalise)
    return row.transform_output(output, options).to(dtype)
