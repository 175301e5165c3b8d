"""Statistics of training: mean losses of an interval, and row statistics of the attentions.

Sums stay on the device until an interval ends, because reading a number waits for the GPU.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from reluformer.model.records import AttentionRecord
from reluformer.ops.stats import Stats, has_weight
from reluformer.processes import Processes


class SiteStatistics(NamedTuple):
    """Means over the rows, heads and layers of the attentions at one site."""

    row_sum: float
    entropy: float
    zeros: float
    """Share of visible keys with weight zero."""
    dead_rows: float
    """Share of rows that see keys and have no weight."""

    def __str__(self) -> str:
        return (
            f"sum {self.row_sum:.2f} H {self.entropy:.2f} "
            f"zeros {self.zeros:.0%} dead {self.dead_rows:.1%}"
        )


LEGEND = (
    "log lines: nll nats per token, norm of the gradients; attention rows: sum of weights, "
    "H entropy in nats, zeros among weights, dead rows without weight"
)
"""Explanation of the words in log lines."""

AttentionStats = dict[str, SiteStatistics]
"""Statistics by site: `encoder`, `decoder`, `cross`."""


def attention_statistics(records: Sequence[AttentionRecord], group: Processes) -> AttentionStats:
    """Statistics by site over the rows of all processes.

    Args:
        records: Records with the statistics `Stats`; may be empty.
        group: The processes.
    """
    sites = sorted({record.site for record in records})
    if not sites:
        return {}
    sums = torch.stack(
        [sum_over_rows([record for record in records if record.site == site]) for site in sites]
    )
    rows = group.add(sums)
    means = (rows[:, :4] / rows[:, 4:].clamp_min(1)).tolist()
    return {site: SiteStatistics(*mean) for site, mean in zip(sites, means, strict=True)}


@torch.no_grad()
def sum_over_rows(records: Sequence[AttentionRecord]) -> Tensor:
    """Sums [5] over rows of row sum, entropy, zeros and dead rows, and the number of rows."""
    total = torch.zeros(5, dtype=torch.float64, device=records[0].stats.row_sum.device)
    for _, _, stats, valid, _ in records:
        assert isinstance(stats, Stats)
        rows = valid & (stats.visible > 0)
        dead = ~has_weight(stats.row_sum)
        columns = (stats.row_sum, stats.entropy, stats.zeros, dead, torch.ones_like(dead))
        total += torch.stack([torch.where(rows, column, 0).sum().double() for column in columns])
    return total


class IntervalLosses(NamedTuple):
    """Means over the steps of an interval: the fields of `objective.LOSSES`, and the norm."""

    loss: float
    nll: float
    normalisation: float
    entropy: float
    expert_balance: float
    grad_norm: float
    """Norm of the gradient before clipping."""


class Meter:
    """Accumulates the losses of the steps of an interval."""

    def __init__(self, group: Processes) -> None:
        self._group = group
        fields = len(IntervalLosses._fields)
        self._total = torch.zeros(fields, dtype=torch.float64, device=group.device)
        self.steps = 0
        """Number of steps in the interval."""
        self.tokens = 0
        """Number of target tokens of all processes in the interval."""

    def add(self, losses: Tensor, grad_norm: Tensor, tokens: int) -> None:
        """Add one step: this process's part of `LOSSES` [5], and the global gradient norm []."""
        self._total[:-1] += losses
        self._total[-1] += grad_norm / self._group.world
        self.steps += 1
        self.tokens += tokens

    def flush(self) -> IntervalLosses:
        """Return the means over the interval and all processes, and start a new interval.

        Waits for the device. A mean is NaN or infinite if any step was.
        """
        means = (self._group.add(self._total) / self.steps).tolist()
        self._total = torch.zeros_like(self._total)
        self.steps = self.tokens = 0
        return IntervalLosses(*means)
