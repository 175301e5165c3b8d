"""Sparse attentions whose rows sum to 1: alpha-entmax, with sparsemax and entmax-1.5."""

import torch
from torch import Tensor

from reluformer.errors import UserError
from reluformer.ops.memory import Scores, hide
from reluformer.ops.rule import per_head

NEWTON_STEPS = 30


def entmax(scores: Scores, *, alpha: float | Tensor = 1.5) -> Tensor:
    """max((alpha - 1) s - tau, 0)^(1 / (alpha - 1)), tau such that the row sums to 1.

    `alpha` in (1, 2] is a number or one value per head [H]. It has a gradient, but the models keep
    it fixed; adaptively sparse transformers (Correia et al. 2019) learn one per head.
    """
    if not isinstance(alpha, Tensor) and not 1 < alpha <= 2:
        raise UserError(f"alpha must be greater than 1 and at most 2, got {alpha}")
    if isinstance(alpha, Tensor):
        alpha = alpha.to(scores.values.dtype)
    slope = per_head(alpha) - 1
    power = 1 / slope
    # Entmax does not change when a row is shifted: with the peak at 0, tau lies in [-1, 0].
    # Hidden keys are set last: an infinite score times the slope would give alpha a NaN gradient.
    values = hide(slope * (scores.values - scores.peak()), scores.visible, -torch.inf)
    return (values - _row_threshold(values, power)).clamp_min(0) ** power


def sparsemax(scores: Scores) -> Tensor:
    """max(s - tau, 0), the Euclidean projection of the scores onto the simplex."""
    return entmax(scores, alpha=2.0)


def entmax15(scores: Scores) -> Tensor:
    """max(s / 2 - tau, 0)^2 with tau such that the row sums to 1."""
    return entmax(scores, alpha=1.5)


def _row_threshold(values: Tensor, power: float | Tensor) -> Tensor:
    """tau [..., Tq, 1] with sum max(values - tau, 0)^power = 1, for row maxima of 0 and power >= 1.

    The sum is convex and decreasing in tau, so Newton's method started at -1, left of the root,
    climbs to it without overshooting. The search leaves no graph. Two more steps, on a graph and
    with the slope at the root as a constant, then have the first two derivatives of tau: where the
    values differ by d from those of the root, one step is wrong by O(d^2) and two by O(d^3).
    """
    with torch.no_grad():
        tau = values.new_full((*values.shape[:-1], 1), -1.0)
        for _ in range(NEWTON_STEPS):
            tau = tau + _surplus(values, tau, power) / _slope(values, tau, power)
        slope = _slope(values, tau, power)
    for _ in range(2):
        tau = tau + _surplus(values, tau, power) / slope
    return tau


def _surplus(values: Tensor, tau: Tensor, power: float | Tensor) -> Tensor:
    """Sum of the weights of each row, minus 1."""
    return ((values - tau).clamp_min(0) ** power).sum(dim=-1, keepdim=True) - 1


def _slope(values: Tensor, tau: Tensor, power: float | Tensor) -> Tensor:
    """Minus the derivative of `_surplus` with respect to tau; 1 where that is 0."""
    distance = (values - tau).clamp_min(0)
    live = distance > 0
    slope = (power * torch.where(live, distance, 1.0) ** (power - 1) * live).sum(-1, True)
    return slope + (slope == 0)
