"""Noticing that a run has failed, or is about to."""

import math

from reluformer.errors import Diverged
from reluformer.train.attention_stats import Attention, IntervalLosses

# Seen in trials long before the loss tells: every query reads one key and never another again.
_COLLAPSED_ENTROPY = 0.1
_COLLAPSED_ZEROS = 0.95
# Healthy runs have next to none; runs that lose a quarter go on to lose more.
_MANY_DEAD_ROWS = 0.25


class Guard:
    """Compares each interval with the best before it."""

    def __init__(self, explosion: float | None, lowest: float = math.inf) -> None:
        self.explosion = explosion
        self.lowest = lowest
        """Lowest negative log-likelihood of an interval so far."""
        self._told: set[str] = set()

    def check(self, step: int, losses: IntervalLosses, attention: Attention) -> None:
        """Raise `Diverged` if the interval that ends with `step` holds a bad number or a leap."""
        for name, value in losses._asdict().items():
            if not math.isfinite(value):
                raise Diverged(step, f"{name} is {value}", attention)
        if self.explosion is not None and losses.nll > self.lowest + self.explosion:
            reason = f"loss per token rose to {losses.nll:.2f} from {self.lowest:.2f}"
            raise Diverged(step, reason, attention)
        self.lowest = min(self.lowest, losses.nll)

    def warnings(self, attention: Attention) -> list[str]:
        """What the attentions show of a failure long before the loss does; each is told once."""
        found = {"collapse": _collapse(attention), "dead": _dead(attention)}
        new = {name: text for name, text in found.items() if text and name not in self._told}
        self._told |= set(new)
        return list(new.values())


def _collapse(attention: Attention) -> str | None:
    """Whether the attention to the source has shrunk to single keys."""
    cross = attention.get("cross")
    if cross is None or cross.entropy > _COLLAPSED_ENTROPY or cross.zeros < _COLLAPSED_ZEROS:
        return None
    return (
        "the attention to the source has collapsed: each query reads about one key "
        f"(entropy {cross.entropy:.2f}, zeros {cross.zeros:.0%}) and the others get no "
        "gradient; start with lower row sums (model.attention.row_sum_init) or weaker "
        "regularisers"
    )


def _dead(attention: Attention) -> str | None:
    """Whether many rows of some site have lost all of their weight."""
    for site, statistics in attention.items():
        if statistics.dead_rows > _MANY_DEAD_ROWS:
            return (
                f"{statistics.dead_rows:.0%} of the rows of {site} attention have no weight and "
                "get no gradient; give train.normalisation_weight a higher value or train.lr a "
                "lower one"
            )
    return None
