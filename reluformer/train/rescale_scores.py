"""One factor for all attention scores, chosen after training by the dev loss.

Dropout adds noise to queries and keys, so scores are smaller in training than in use. In use,
softmax is then sharper than the model was trained for. Rectified weights without row normalisation
also have larger row sums (docs/training-relu-attention.md).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from reluformer.model import ReLUFormer
from reluformer.model.attention import MultiHeadAttention

_RATIO = 0.95
_MOST = 20


class ScoreRescaling(NamedTuple):
    """Result of the search for the factor."""

    factor: float
    """Factor of the scores."""
    before: float
    """Loss without the factor."""
    after: float
    """Loss with the factor."""


def score_multiplier(model: ReLUFormer) -> Callable[[float], None]:
    """A function that sets the attention scores of `model` to a multiple of the present ones."""
    gains = [
        (parameter, parameter.detach().clone())
        for module in model.modules()
        if isinstance(module, MultiHeadAttention)
        for parameter in module.score_gains()
    ]

    @torch.no_grad()
    def multiply(factor: float) -> None:
        for parameter, original in gains:
            parameter.copy_(original * factor)

    return multiply


def rescale_scores(model: ReLUFormer, loss: Callable[[], float]) -> ScoreRescaling:
    """Multiply all attention scores by the factor with the lowest loss, in place.

    The search starts at 1 and proceeds in steps of 5 % while the loss falls, first downwards, where
    the optimum lies after training with dropout.

    Args:
        model: The model.
        loss: Computes the loss of the model as it is.
    """
    multiply = score_multiplier(model)
    before = lowest = loss()
    best = 1.0
    for ratio in (_RATIO, 1 / _RATIO):
        for _ in range(_MOST):
            multiply(best * ratio)
            value = loss()
            # This form also refuses NaN.
            if not value < lowest:
                break
            best, lowest = best * ratio, value
        if best != 1.0:
            break
    multiply(best)
    return ScoreRescaling(best, before, lowest)
