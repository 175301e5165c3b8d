"""Gradient of gamma, shared by the fused kernels."""

from typing import NamedTuple

from torch import Tensor

from reluformer.ops.stats import sampled_rows


class RowGradients(NamedTuple):
    """Gradients of the loss with respect to the row statistics; None if they are not used."""

    row_sum: Tensor | None
    log_sum: Tensor | None


def gamma_gradient(
    gamma: Tensor,
    row_dot: Tensor,
    row_sum: Tensor | None,
    log_sum: Tensor | None,
    grads: RowGradients,
    row_normalise: float = 0.0,
    entropy_every: int = 1,
) -> Tensor:
    """Gradient of gamma [H]: every weight is proportional to 1 / gamma.

    Args:
        gamma: [H].
        row_dot: Sum over Dv of output times its gradient, [B, H, Tq], or [N, H] if packed.
        row_sum: sum_j w_ij before row normalisation, shape of row_dot.
        log_sum: sum_j w_ij ln w_ij, shape of row_dot.
        grads: Gradients of the row statistics, shape of row_dot.
        row_normalise: Number added to a row's sum before the row is divided by it; 0: no division.
        entropy_every: See `Call.entropy_every`; log_sum is constant in rows that are not sampled.
    """
    if row_normalise > 0:
        assert row_sum is not None
        # gamma cancels in w / sum(w); only the constant in the denominator leaves this share.
        row_dot = row_dot * (row_normalise / (row_sum + row_normalise))
    if grads.row_sum is not None:
        assert row_sum is not None
        row_dot = row_dot + grads.row_sum * row_sum
    if grads.log_sum is not None:
        assert row_sum is not None and log_sum is not None
        log_part = grads.log_sum * (row_sum + log_sum)
        if entropy_every > 1:
            batch, heads, rows = log_part.shape
            sampled = sampled_rows(batch, heads, rows, entropy_every, gamma.device)
            log_part = log_part * sampled
        row_dot = row_dot + log_part
    total = row_dot.sum((0, 2) if row_dot.dim() == 3 else 0)
    return (-total / gamma).to(gamma.dtype)
