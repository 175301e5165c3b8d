"""Attentions whose weight depends on one score alone, and stick-breaking, which scans the keys."""

import math

import torch
from torch import Tensor
from torch.nn import functional

from reluformer.errors import UserError
from reluformer.ops.memory import Scores, hide
from reluformer.ops.rule import per_head


def sigmoid(scores: Scores, *, offset: float | Tensor | None = None) -> Tensor:
    """sigmoid(s + b); b = -ln n for each row by default.

    `offset` fixes b to a number or one value per head [H]: the published configurations use the
    constant -ln(training length), which is another model at every other length.
    """
    if offset is None:
        return torch.sigmoid(scores.values - scores.n.clamp_min(1).log())
    return torch.sigmoid(scores.values + per_head(offset))


def polynomial(scores: Scores, *, power: int = 3) -> Tensor:
    """s^power / sqrt(n), signed; 3 is the paper's best power in a ViT (unconfirmed elsewhere)."""
    if not isinstance(power, int) or power < 1:
        raise UserError(f"power must be a whole number of at least 1, got {power}")
    return scores.values**power / scores.n.clamp_min(1).sqrt()


def laplace(scores: Scores) -> Tensor:
    """(1 + erf((s/n - mu) / (sigma sqrt 2))) / 2, mu = sqrt(1/2), sigma = sqrt(1 / (4 pi)).

    These constants match value and slope of a squared ReLU at sqrt(1/2); some published copies use
    sigma = sqrt(pi/4), which does not. The paper divides raw q.k by n; our s carries 1/sqrt(D).
    """
    mean, deviation = math.sqrt(0.5), math.sqrt(0.25 / math.pi)
    x = scores.values / scores.n.clamp_min(1)
    return 0.5 * (1 + torch.erf((x - mean) / (deviation * math.sqrt(2))))


def gelu(scores: Scores) -> Tensor:
    """GELU(s): the activation of most feed-forward memories."""
    return functional.gelu(scores.values)


def silu(scores: Scores) -> Tensor:
    """s sigmoid(s)."""
    return functional.silu(scores.values)


def silu_n(scores: Scores) -> Tensor:
    """s sigmoid(s) / n, signed: a score below 0 gives a weight between -0.28 / n and 0.

    HSTU adds a learned bias for the distance in positions and time to s (here: `bias=`), and its
    implementations divide by the longest length of the batch instead of n.
    """
    return functional.silu(scores.values) / scores.n.clamp_min(1)


def stick_breaking(scores: Scores) -> Tensor:
    """sigmoid(s_j) times the product of (1 - sigmoid(s_k)) over the visible keys k after j.

    Keys are taken from the last to the first; each takes its share of what is left of the stick.
    The paper's causal form excludes the query's own key (j < i). Here the visible keys are those of
    every other attention, so that a causal query also sees its own key.
    """
    left = hide(functional.logsigmoid(-scores.values), scores.visible)
    # Shifted by one key before the sum: taking `left` off afterwards would cancel digits. Padded
    # first: a program that is exported has no tensor of Tk - 1 keys, whose size might be 0 or 1.
    after = functional.pad(left, (0, 1))[..., 1:].flip(-1).cumsum(-1).flip(-1)
    return (functional.logsigmoid(scores.values) + after).exp()
