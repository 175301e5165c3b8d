"""The row-sum and entropy losses of one layer, added as gradients in its backward pass.

A layer that returns only its output cannot report a loss to the training loop. `add_gradient`
leaves the output as it is and adds the gradient of the loss to a statistic of the rows, as if the
training loop had added the loss itself.
"""

from typing import Any

import torch
from torch import Tensor

from reluformer.ops.stats import has_weight

ENTROPY_MARGIN = 0.7
"""Entropies up to this factor times ln n have no loss (Shen et al. 2023, Eq. 7)."""


def row_sum_gradient(row_sum: Tensor, valid: Tensor | None) -> Tensor:
    """Gradient with respect to `row_sum` of the mean of |ln row_sum| over live rows.

    Args:
        row_sum: Sums of the unnormalised weights, [B, H, Tq]. Live rows are those of `has_weight`.
        valid: Rows that count, bool, broadcastable to `row_sum`; None for all.

    Returns:
        [B, H, Tq]; 0 for rows that are not live, such as those that see no key.
    """
    live = _live(row_sum, valid)
    total = torch.where(live, row_sum, 1.0)
    return total.log().sign() / total / live.sum().clamp_min(1)


def entropy_gradient(
    entropy: Tensor, visible: Tensor, row_sum: Tensor, valid: Tensor | None
) -> Tensor:
    """Gradient with respect to `entropy` of the mean of max(H - 0.7 ln n, 0) over live rows.

    Args:
        entropy: Entropies H of the rows in nats, [B, H, Tq].
        visible: Number n of keys that each row sees, [B, H, Tq].
        row_sum: Sums of the unnormalised weights, [B, H, Tq].
        valid: Rows that count, bool, broadcastable to `row_sum`; None for all.
    """
    live = _live(row_sum, valid)
    above = live & (entropy > ENTROPY_MARGIN * visible.clamp_min(1).log())
    return above.to(entropy.dtype) / live.sum().clamp_min(1)


def add_gradient(output: Tensor, statistic: Tensor, gradient: Tensor) -> Tensor:
    """`output` unchanged; its backward pass adds `gradient` to the gradient of `statistic`.

    The gradient is a constant: derivatives of second order do not include the loss.
    """
    result: Tensor = _AddGradient.apply(output, statistic, gradient)  # type: ignore[no-untyped-call]
    return result


def _live(row_sum: Tensor, valid: Tensor | None) -> Tensor:
    live = has_weight(row_sum)
    return live if valid is None else live & valid


class _AddGradient(torch.autograd.Function):
    """Identity of `output`, with a constant gradient for `statistic`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(output: Tensor, statistic: Tensor, gradient: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return grad_output, gradient, None
