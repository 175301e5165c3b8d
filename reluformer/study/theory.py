"""Closed forms for variance, row sum and entropy against sampling.

Scores and values are independent N(0, 1), gamma is 1. A row with weights w reads sum_j w_j v_j,
whose variance given the weights is sum_j w_j^2.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

SIZES = tuple(2**exponent for exponent in range(3, 14))
"""Numbers of keys: 8 to 8192."""

# E[r ln r] / E[r] of r = ReLU(x) is (ln 2 - Euler's constant) / 2.
_RELU_ENTROPY = 0.5 * math.log(2 * math.pi) + 0.5 * (math.log(2) - 0.5772156649015329)
# At a time, to bound memory.
_MOST_ROWS = 2**20


class Quantity(NamedTuple):
    """One closed form and how to sample it."""

    name: str
    formula: str
    closed: Callable[[int], float]
    sample: Callable[[Tensor], Tensor]
    """Values [rows] from scores [rows, n], whose mean the closed form is."""
    exact: bool
    """Whether the closed form holds for every n, not only in the limit."""


def _scaled(scores: Tensor) -> Tensor:
    """ReLU(s) / sqrt(n / 2)."""
    return scores.relu() / math.sqrt(scores.shape[-1] / 2)


def _entropy(weights: Tensor) -> Tensor:
    shares = weights / weights.sum(dim=-1, keepdim=True).clamp_min(1e-30)
    return -torch.xlogy(shares, shares).sum(dim=-1)


def _raw_entropy(n: int) -> float:
    row_sum = math.sqrt(n / math.pi)
    return row_sum * (math.log(n) - _RELU_ENTROPY - math.log(row_sum))


QUANTITIES = (
    Quantity("ReLU variance", "n / 2", lambda n: n / 2,
             lambda s: s.relu().square().sum(dim=-1), True),
    Quantity("scaled ReLU variance", "1", lambda n: 1.0,
             lambda s: _scaled(s).square().sum(dim=-1), True),
    Quantity("scaled ReLU row sum", "sqrt(n / pi)", lambda n: math.sqrt(n / math.pi),
             lambda s: _scaled(s).sum(dim=-1), True),
    Quantity("ReLU entropy", "ln n - 0.977", lambda n: math.log(n) - _RELU_ENTROPY,
             lambda s: _entropy(s.relu()), False),
    Quantity("scaled ReLU raw entropy", "S (H - ln S)", _raw_entropy,
             lambda s: -torch.xlogy(_scaled(s), _scaled(s)).sum(dim=-1), True),
    Quantity("softmax variance", "e / n", lambda n: math.e / n,
             lambda s: s.softmax(dim=-1).square().sum(dim=-1), False),
    Quantity("softmax entropy", "ln n - 0.5", lambda n: math.log(n) - 0.5,
             lambda s: _entropy(s.softmax(dim=-1)), False),
)  # fmt: skip


class Sample(NamedTuple):
    """One quantity at one n."""

    quantity: str
    n: int
    closed: float
    measured: float
    error: float
    """Standard error of the measured mean."""


def sample_quantities(numbers: int, seed: int = 0) -> list[Sample]:
    """Measure every quantity at every size from about `numbers` random scores a size."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for n in SIZES:
        rows = max(16, numbers // n)
        parts: dict[str, list[Tensor]] = {quantity.name: [] for quantity in QUANTITIES}
        step = max(1, _MOST_ROWS // n)
        for begin in range(0, rows, step):
            count = min(step, rows - begin)
            scores = torch.randn(count, n, generator=generator, dtype=torch.float64)
            for quantity in QUANTITIES:
                parts[quantity.name].append(quantity.sample(scores))
        for quantity in QUANTITIES:
            values = torch.cat(parts[quantity.name])
            error = float(values.std()) / math.sqrt(len(values))
            closed = quantity.closed(n)
            samples.append(Sample(quantity.name, n, closed, float(values.mean()), error))
    return samples
