"""Detection of failed training, and warnings before it fails."""

import math

from reluformer.errors import Diverged
from reluformer.train.attention_stats import AttentionStats, IntervalLosses

# Collapse: every query attends to a single key. In trials this precedes a rise of the loss.
_COLLAPSED_ENTROPY = 0.1
_COLLAPSED_ZEROS = 0.95
# Healthy runs have almost no dead rows; in runs with a quarter of them, the share keeps growing.
_MANY_DEAD_ROWS = 0.25


class Guard:
    """Compares the losses of each interval with the lowest before it.

    Args:
        explosion: Rise of the negative log-likelihood, in nats, that counts as divergence; None
            allows any.
        lowest: Lowest negative log-likelihood of an interval so far.
    """

    def __init__(self, explosion: float | None, lowest: float = math.inf) -> None:
        self.explosion = explosion
        self.lowest = lowest
        self._reported: set[str] = set()

    def check(self, step: int, losses: IntervalLosses, attention: AttentionStats) -> None:
        """Raise `Diverged` if a loss of the interval up to `step` is not finite or exploded."""
        for name, value in losses._asdict().items():
            check_finite(step, name, value, attention)
        if self.explosion is not None and losses.nll > self.lowest + self.explosion:
            reason = f"loss per token rose to {losses.nll:.2f} from {self.lowest:.2f}"
            raise Diverged(step, reason, attention)
        self.lowest = min(self.lowest, losses.nll)

    def warnings(self, attention: AttentionStats) -> list[str]:
        """New warnings about collapsed attention and dead rows; each kind is returned once."""
        texts = {"collapse": _collapse(attention), "dead": _dead(attention)}
        new = {name: text for name, text in texts.items() if text and name not in self._reported}
        self._reported |= set(new)
        return list(new.values())


def check_finite(step: int, name: str, value: float, attention: AttentionStats) -> None:
    """Raise `Diverged` if a loss that was measured after `step` is not finite."""
    if not math.isfinite(value):
        raise Diverged(step, f"{name} is {value}", attention)


def _collapse(attention: AttentionStats) -> str | None:
    """Warning if cross-attention has collapsed to single keys."""
    cross = attention.get("cross")
    if cross is None or cross.entropy > _COLLAPSED_ENTROPY or cross.zeros < _COLLAPSED_ZEROS:
        return None
    return (
        "cross-attention has collapsed: each query attends to about one key "
        f"(entropy {cross.entropy:.2f}, zeros {cross.zeros:.0%}) and the other keys get no "
        "gradient; start with lower row sums (model.attention.row_sum_init) or weaker "
        "regularisers"
    )


def _dead(attention: AttentionStats) -> str | None:
    """Warning if many rows of one site have no weight."""
    for site, statistics in attention.items():
        if statistics.dead_rows > _MANY_DEAD_ROWS:
            return (
                f"{statistics.dead_rows:.0%} of the rows of {site} attention have no weight and "
                "get no gradient; increase train.normalisation_weight or decrease train.lr"
            )
    return None
