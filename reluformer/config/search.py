"""Settings of the search for translations."""

import math
from dataclasses import dataclass
from typing import Literal

from reluformer.config.checks import check_at_least
from reluformer.config.schema import check_fields
from reluformer.errors import UserError

LEAST_TEMPERATURE = 1e-6
# Larger values overflow, or fill the memory. A length penalty may also be negative.
_LARGEST = {"beam": 1000, "length_penalty": 20, "max_ratio": 1000, "max_extra": 10**6}


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
    max_length: int | None = None
    """Length in ids of the longest text that is translated at once; None: as in training."""
    temperature: float = 1.0
    """Logits are divided by this before sampling; lower values favour likely tokens."""
    top_k: int | None = None
    """Sample from this many most likely tokens; None samples from all."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probabilities reach this sum."""
    seed: int = 0
    """Seed of sampling."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_at_least(1, self, "beam", "max_extra", "top_k")
        check_at_least(2, self, "max_length")
        check_at_least(0, self, "max_ratio", "seed")
        # Logits divided by less overflow.
        if self.temperature < LEAST_TEMPERATURE:
            raise UserError(
                f"temperature must be at least {LEAST_TEMPERATURE}, got {self.temperature}"
            )
        for name, most in _LARGEST.items():
            if abs(getattr(self, name)) > most:
                raise UserError(f"{name} must be at most {most}, got {getattr(self, name)}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be in (0, 1], got {self.top_p}")

    def longest(self, source: int) -> int:
        """Maximum length of the translation of `source` tokens."""
        return int(self.max_ratio * source) + self.max_extra

    def score(self, log_probability: float, length: int) -> float:
        """Score of a hypothesis of `length` tokens, end token included."""
        return log_probability / math.pow(length, self.length_penalty)
