"""Partial sums of rectified attention over subsets of the keys.

A rectified weight c_i f(s_ij) does not depend on the other keys, except for the scale c_i, which
depends on the number of keys that row i sees. Each rank therefore sums f(s_ij) v_j over its keys,
the sums of the ranks are added, and c_i multiplies the total. No maximum and no log-sum-exp has to
be merged. With `Rectified.row_normalise`, the row sums of f(s_ij) are added in the same way, and
the rows are divided once, at the end.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from reluformer.errors import UserError
from reluformer.ops.api import attend
from reluformer.ops.call import Call
from reluformer.ops.definition import Attention
from reluformer.ops.family.table import ATTENTIONS, lookup
from reluformer.ops.rule import Rectified


def additive(name: str) -> Attention:
    """Look up an attention whose partial sums add up.

    Raises:
        UserError: If the attention is unknown or has no rectified rule.
    """
    row = lookup(name)
    if row.rule is None:
        known = ", ".join(sorted(other for other, row in ATTENTIONS.items() if row.rule))
        raise UserError(
            f"name must be a rectified attention ({known}), because only their partial outputs can "
            f"be summed over ranks; got {name}"
        )
    return row


def rule_of(row: Attention, options: Mapping[str, Any]) -> Rectified:
    """The rectified rule of an attention with its options."""
    rule = row.rectified(options)
    assert rule is not None
    return rule


def sum_over_keys(rule: Rectified, call: Call, impl: str) -> tuple[Tensor, ...]:
    """Sums over the keys of a call, without the scale c_i.

    Returns:
        sum_j f(s_ij) v_j, [B, H, Tq, Dv]. With row normalisation also sum_j f(s_ij) before dropout,
        [B, H, Tq, 1], in float32 or wider.
    """
    q, k, v = call.q, call.k, call.v
    if q.dtype == torch.float16:
        # Sums without the scale exceed the range of float16 for long contexts.
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
    """Output of an attention from its sums over all keys.

    Args:
        row: The attention.
        options: Its options.
        sums: The results of `sum_over_keys`, added over all ranks.
        n: Number of keys that each row sees, broadcastable to [B, H, Tq].
        dtype: Type of the output.

    Returns:
        [B, H, Tq, Dv].
    """
    rule = rule_of(row, options)
    output, *row_sum = sums
    scale = rule.scale_of(n.to(output.dtype).unsqueeze(-1))
    output = output * scale
    if rule.row_normalise is not None:
        output = output / (row_sum[0] * scale + rule.row_normalise)
    return row.transform_output(output, options).to(dtype)
