"""Settings of the search for translations."""

import math
from dataclasses import dataclass
from typing import Literal

from reluformer.errors import UserError


@dataclass(frozen=True)
class SearchConfig:
    """Settings of the search; temperature, top_k, top_p and seed apply to sampling only."""

    method: Literal["beam", "sample"] = "beam"
    """Beam search, or sampling."""
    beam: int = 5
    """Number of hypotheses per sentence; 1 is greedy search."""
    length_penalty: float = 1.0
    """Hypotheses are ranked by log-probability divided by length to this power."""
    max_ratio: float = 2.0
    """See `max_extra`."""
    max_extra: int = 20
    """A translation has at most max_ratio * source tokens + max_extra tokens."""
    temperature: float = 1.0
    """Logits are divided by this before sampling; lower values favour likely tokens."""
    top_k: int | None = None
    """Sample from this many most likely tokens; None samples from all."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probabilities reach this sum."""
    seed: int = 0
    """Seed of sampling."""

    def __post_init__(self) -> None:
        if self.method not in ("beam", "sample"):
            raise UserError(f"method must be one of beam, sample, got {self.method!r}")
        if self.beam < 1:
            raise UserError(f"beam must be at least 1, got {self.beam}")
        if not math.isfinite(self.length_penalty):
            raise UserError(f"length_penalty must be a finite number, got {self.length_penalty}")
        if not 0 <= self.max_ratio < math.inf:
            raise UserError(f"max_ratio must be finite and at least 0, got {self.max_ratio}")
        if self.max_extra < 1:
            raise UserError(f"max_extra must be at least 1, got {self.max_extra}")
        if not 0 < self.temperature < math.inf:
            raise UserError(f"temperature must be finite and above 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k must be at least 1, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed must be a whole number from 0 to 2^63 - 1, got {self.seed}")

    def longest(self, source: int) -> int:
        """Maximum length of the translation of `source` tokens."""
        return int(self.max_ratio * source) + self.max_extra

    def score(self, log_probability: float, length: int) -> float:
        """Score of a hypothesis of `length` tokens, end token included."""
        return log_probability / math.pow(length, self.length_penalty)
