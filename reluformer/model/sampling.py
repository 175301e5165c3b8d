"""Sampling of tokens from logits."""

from typing import Protocol

import torch
from torch import Tensor


class SamplingConfig(Protocol):
    """Settings of sampling."""

    @property
    def temperature(self) -> float:
        """Divisor of the logits, above 0."""

    @property
    def top_k(self) -> int | None:
        """Number of the most likely tokens to sample from; None takes all."""

    @property
    def top_p(self) -> float:
        """Sample from the fewest tokens whose probabilities reach this sum."""


def draw(logits: Tensor, numbers: Tensor, config: SamplingConfig) -> Tensor:
    """Sample one token for each row by inverting the cumulative distribution.

    Args:
        logits: [B, vocabulary].
        numbers: Uniform random numbers in [0, 1), [B].
        config: The distribution is cut to the `top_k` most likely tokens, and then to the fewest
            that reach `top_p`, at least one.

    Returns:
        Token ids [B].
    """
    size = logits.shape[-1] if config.top_k is None else min(config.top_k, logits.shape[-1])
    likeliest = (logits / config.temperature).topk(size, dim=-1)
    shares = likeliest.values.double().softmax(dim=-1)
    reached = shares.cumsum(dim=-1)
    # A token is kept while the tokens before it have not reached top_p.
    kept = torch.where(reached - shares < config.top_p, shares, 0.0)
    edges = kept.cumsum(dim=-1)
    place = torch.searchsorted(edges, numbers.unsqueeze(-1) * edges[:, -1:], right=True)
    # Rounding may place a number on the last edge.
    last = (kept > 0).sum(dim=-1, keepdim=True) - 1
    return likeliest.indices.gather(1, torch.minimum(place, last)).squeeze(-1)
