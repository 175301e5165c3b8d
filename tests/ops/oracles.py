"""Every attention once more, naively: one row of visible scores in, a list of weights out.

Written from the published formulas with Python numbers and loops, sharing no code with the package.
`ORACLES` must name every row of the table.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

Numbers = list[float]


class Row(NamedTuple):
    """Visible scores of one query row: all of D, the second half of D; and the width D."""

    s: Numbers
    width: int
    second: Numbers | None = None

    @property
    def n(self) -> int:
        return len(self.s)


@dataclass(frozen=True)
class Oracle:
    """`weigh` maps a Row to weights, `finish` the heads' outputs of one token to their final form.

    `total` is the sum of the weights of a row with at least one live weight, where it is fixed.
    """

    weigh: Callable[..., Numbers]
    output_transform: Callable[..., list[Numbers]] | None = None
    total: float | None = None


def relu(
    row: Row,
    gamma: float = 1.0,
    length_exponent: float = 0.5,
    power: float = 1,
    threshold: float = 0.0,
    negative_slope: float = 0.0,
) -> Numbers:
    weights = []
    for s in row.s:
        x = s - threshold
        active = x if x > 0 else negative_slope * x
        weights.append(active**power / (gamma * (row.n / 2) ** length_exponent))
    return weights


def normalised_relu(
    row: Row,
    gamma: float | None = None,
    length_exponent: float = 1.0,
    power: int = 8,
    threshold: float | None = None,
    row_normalise: float = 1e-4,
) -> Numbers:
    # With the defaults this is (1 + s/8)^8 / n before normalisation.
    start = -power if threshold is None else threshold
    divisor = 2 * power**power if gamma is None else gamma
    weights = relu(row, divisor, length_exponent, power, start)
    total = sum(weights)
    return [w / (total + row_normalise) for w in weights]


def tra(row: Row, beta: float = 1.0, kappa: float = 1.0, power: float = 2) -> Numbers:
    tau = beta * math.sqrt(2 * max(math.log(row.n / kappa), 0) / row.width)
    return [max(s - tau, 0) ** power for s in row.s]


def tda(row: Row, lam: float = 0.5, **options: Any) -> Numbers:
    assert row.second is not None
    first, second = tra(row, **options), tra(Row(row.second, row.width), **options)
    return [a - lam * b for a, b in zip(first, second, strict=True)]


def softmax(row: Row) -> Numbers:
    total = sum(math.exp(s) for s in row.s)
    return [math.exp(s) / total for s in row.s]


def sink(row: Row, sink: float = 0.0) -> Numbers:
    total = math.exp(sink) + sum(math.exp(s) for s in row.s)
    return [math.exp(s) / total for s in row.s]


def ssmax(row: Row, temperature: float = 1.0) -> Numbers:
    return softmax(Row([temperature * math.log(row.n) * s for s in row.s], row.width))


def softpick(row: Row, epsilon: float = 1e-6) -> Numbers:
    total = sum(abs(math.exp(s) - 1) for s in row.s) + epsilon
    return [max(math.exp(s) - 1, 0) / total for s in row.s]


def lssa(row: Row) -> Numbers:
    sharpness = math.log(row.width) * math.log(row.n)
    weights = [math.log(1 + math.exp(sharpness * s)) for s in row.s]
    return [w / sum(weights) for w in weights]


def lssar(row: Row, power: float = 3.0) -> Numbers:
    offset = 1 if row.n > 3 else 0
    weights = [max(row.n * a - offset, 0) ** power for a in lssa(row)]
    return [w / sum(weights) for w in weights]


def differential(row: Row, lam: float = 0.2) -> Numbers:
    assert row.second is not None
    second = softmax(Row(row.second, row.width))
    return [a - lam * b for a, b in zip(softmax(row), second, strict=True)]


def cog(row: Row) -> Numbers:
    sizes = softmax(Row([abs(s) for s in row.s], row.width))
    return [math.copysign(w, s) for w, s in zip(sizes, row.s, strict=True)]


def self_adjust(row: Row) -> Numbers:
    return [s * w for s, w in zip(row.s, softmax(row), strict=True)]


def self_adjust_normalised(row: Row) -> Numbers:
    low, high = min(*row.s, 0.0), max(*row.s, 0.0)
    return [(s - low) / (high - low) * w for s, w in zip(row.s, softmax(row), strict=True)]


def top_k(row: Row, keep: int = 8) -> Numbers:
    smallest = sorted(row.s, reverse=True)[: min(keep, row.n)][-1]
    total = sum(math.exp(s) for s in row.s if s >= smallest)
    return [math.exp(s) / total if s >= smallest else 0.0 for s in row.s]


def assa(row: Row, mix: tuple[float, float] = (1.0, 1.0)) -> Numbers:
    a = math.exp(mix[0]) / (math.exp(mix[0]) + math.exp(mix[1]))
    return [a * w + (1 - a) * max(s, 0) ** 2 for w, s in zip(softmax(row), row.s, strict=True)]


def entmax(row: Row, alpha: float = 1.5) -> Numbers:
    def weights(tau: float) -> Numbers:
        return [max((alpha - 1) * s - tau, 0) ** (1 / (alpha - 1)) for s in row.s]

    high = (alpha - 1) * max(row.s)
    low = high - 1
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(weights(middle)) > 1 else (low, middle)
    return weights((low + high) / 2)


def sigmoid(row: Row, offset: float | None = None) -> Numbers:
    shift = -math.log(row.n) if offset is None else offset
    return [1 / (1 + math.exp(-s - shift)) for s in row.s]


def polynomial(row: Row, power: int = 3) -> Numbers:
    return [s**power / math.sqrt(row.n) for s in row.s]


def laplace(row: Row) -> Numbers:
    mean, deviation = math.sqrt(1 / 2), math.sqrt(1 / (4 * math.pi))
    points = [(s / row.n - mean) / (deviation * math.sqrt(2)) for s in row.s]
    return [0.5 * (1 + math.erf(x)) for x in points]


def stick_breaking(row: Row) -> Numbers:
    weights, left = [], 1.0
    for s in reversed(row.s):
        share = 1 / (1 + math.exp(-s))
        weights.append(left * share)
        left *= 1 - share
    return weights[::-1]


def rms_over_heads(
    z: list[Numbers], gain: Numbers | None = None, gate: Numbers | None = None
) -> list[Numbers]:
    flat = [x for head in z for x in head]
    size = math.sqrt(sum(x * x for x in flat) / len(flat) + 1e-6)
    done = []
    for i, x in enumerate(flat):
        y = x / size * (1 if gain is None else gain[i])
        done.append(y if gate is None else y / (1 + math.exp(-gate[i] * x)))
    return _regroup(done, z)


def rms_in_head(
    z: list[Numbers], gain: Numbers | None = None, factor: float = 1.0
) -> list[Numbers]:
    done = []
    for head in z:
        size = math.sqrt(sum(x * x for x in head) / len(head) + 1e-6)
        done += [factor * x / size for x in head]
    return _regroup(done if gain is None else [g * x for g, x in zip(gain, done, strict=True)], z)


def rms_differential(
    z: list[Numbers], gain: Numbers | None = None, lam_init: float = 0.2
) -> list[Numbers]:
    return rms_in_head(z, gain, 1 - lam_init)


def gate_by_token(z: list[Numbers], gate: list[Numbers] | None = None) -> list[Numbers]:
    if gate is None:
        return z
    return [
        [x / (1 + math.exp(-g)) for x, g in zip(*pair, strict=True)]
        for pair in zip(z, gate, strict=True)
    ]


def _regroup(flat: Numbers, like: list[Numbers]) -> list[Numbers]:
    width = len(like[0])
    return [flat[h * width : (h + 1) * width] for h in range(len(like))]


ORACLES: dict[str, Oracle] = {
    "relu": Oracle(relu),
    "normalised_relu": Oracle(normalised_relu),
    "softmax": Oracle(softmax, total=1),
    "relu_n": Oracle(
        lambda row, length_exponent=1.0: [max(s, 0) / row.n**length_exponent for s in row.s]
    ),
    "rela": Oracle(lambda row: [max(s, 0) for s in row.s], rms_over_heads),
    "squared_relu": Oracle(lambda row: [max(s, 0) ** 2 / row.n for s in row.s]),
    "squared_relu_n2": Oracle(lambda row: [max(s / row.n, 0) ** 2 for s in row.s]),
    "leaky_relu": Oracle(
        lambda row, negative_slope=0.1, length_exponent=0.5: relu(
            row, negative_slope=negative_slope, length_exponent=length_exponent
        )
    ),
    "cosine_relu": Oracle(lambda row, temperature=1.0: [max(temperature * s, 0) for s in row.s]),
    "tra": Oracle(tra, rms_in_head),
    "tda": Oracle(tda, rms_in_head),
    "sparsemax": Oracle(lambda row: entmax(row, 2.0), total=1),
    "entmax15": Oracle(lambda row: entmax(row, 1.5), total=1),
    "entmax": Oracle(entmax, total=1),
    "sigmoid": Oracle(sigmoid),
    "softmax1": Oracle(lambda row: sink(row, 0.0)),
    "sink": Oracle(sink),
    "ssmax": Oracle(ssmax, total=1),
    "softpick": Oracle(softpick),
    "lssa": Oracle(lssa, total=1),
    "lssar": Oracle(lssar, total=1),
    "differential": Oracle(differential, rms_differential),
    "cog": Oracle(cog),
    "self_adjust": Oracle(self_adjust),
    "self_adjust_normalised": Oracle(self_adjust_normalised),
    "polynomial": Oracle(polynomial),
    "laplace": Oracle(laplace),
    "silu": Oracle(lambda row: [s / (1 + math.exp(-s)) / row.n for s in row.s]),
    "stick_breaking": Oracle(stick_breaking),
    "top_k": Oracle(top_k, total=1),
    "assa": Oracle(assa),
    "gated": Oracle(softmax, gate_by_token, total=1),
}
