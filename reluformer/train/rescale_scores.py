"""One factor on all scores, found after training.

Dropout adds noise to what attentions read: queries and keys agree less while a model learns than
when it is used, and every score is then larger than the values were fitted to. Softmax turns
sharper by it; rectified weights also turn louder, for nothing divides by their sum
(docs/training-relu-attention.md).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from reluformer.model import ReLUFormer
from reluformer.model.attention import MultiHeadAttention

_RATIO = 0.95
_MOST = 20


class Tempered(NamedTuple):
    """What the search found."""

    factor: float
    """What scores were multiplied by."""
    before: float
    after: float
    """Loss without and with the factor."""


def score_multiplier(model: ReLUFormer) -> Callable[[float], None]:
    """A function that sets all attention scores of `model` to so many times what they are now."""
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


def rescale_scores(model: ReLUFormer, loss: Callable[[], float]) -> Tempered:
    """Multiply the scores of all attentions by the factor for which `loss` is lowest, in place.

    Walks from 1 in steps of 5 % as long as the loss falls: downwards first, for that is where
    dropout leaves the best.
    """
    multiply = score_multiplier(model)
    before = lowest = loss()
    best = 1.0
    for ratio in (_RATIO, 1 / _RATIO):
        for _ in range(_MOST):
            multiply(best * ratio)
            found = loss()
            if found >= lowest:
                break
            best, lowest = best * ratio, found
        if best != 1.0:
            break
    multiply(best)
    return Tempered(best, before, lowest)
