"""How to search for a translation."""

import math
from dataclasses import dataclass
from typing import Literal

from reluformer.errors import UserError


@dataclass(frozen=True)
class SearchConfig:
    """Settings of a search. A beam of 1 is greedy; the last four are for sampling alone."""

    method: Literal["beam", "sample"] = "beam"
    beam: int = 5
    length_penalty: float = 1.0
    """A hypothesis is ranked by its log-probability divided by its length to this power."""
    max_ratio: float = 2.0
    max_extra: int = 20
    """A translation has at most max_ratio * source + max_extra tokens."""
    temperature: float = 1.0
    """Below 1 samples likelier tokens, above 1 less likely ones."""
    top_k: int | None = None
    """Sample among so many of the likeliest tokens."""
    top_p: float = 1.0
    """Sample among the fewest tokens whose probabilities reach this sum."""
    seed: int = 0

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
        """Most tokens of the translation of so many source tokens."""
        return int(self.max_ratio * source) + self.max_extra

    def score(self, log_probability: float, length: int) -> float:
        """What hypotheses of `length` tokens, end mark included, are ranked by."""
        return log_probability / math.pow(length, self.length_penalty)
