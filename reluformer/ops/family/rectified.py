"""Rectified attentions: weights from max(s - threshold, 0), with no statistic over the row.

Each function takes its options and returns a `Rectified` rule, which the fused backends run. s is
the scaled score, n the number of keys the row can see.
"""

from dataclasses import replace
from functools import partial

from torch import Tensor

from reluformer.errors import UserError, quote
from reluformer.ops.memory import Scores
from reluformer.ops.rule import LEAST_EPSILON, POWERS, Rectified, per_head


def relu(
    *,
    gamma: float | Tensor = 1.0,
    length_exponent: float = 0.5,
    power: int = 1,
    threshold: float | Tensor = 0.0,
    negative_slope: float = 0.0,
    row_normalise: float | None = None,
) -> Rectified:
    """ReLUFormer: ReLU(s - threshold)^power / (gamma * (n/2)^length_exponent).

    With `row_normalise`, a row is divided by its sum plus that number, which the paper does not do.
    """
    return Rectified(gamma, length_exponent, power, threshold, negative_slope, row_normalise)


# Default gamma and threshold by power; a compiler cannot raise a symbol to itself.
_STARTS = {power: (2.0 * power**power, -float(power)) for power in POWERS}


def normalised_relu(
    *,
    gamma: float | Tensor | None = None,
    length_exponent: float = 1.0,
    power: int = 8,
    threshold: float | Tensor | None = None,
    row_normalise: float = 1e-4,
) -> Rectified:
    """ReLU(s - threshold)^power / (gamma (n/2)^length_exponent), divided by its row sum.

    The default threshold is -power and the default gamma 2 power^power: before normalisation a
    weight is then ReLU(1 + s/power)^power / n, which is close to e^s / n for small scores, and a
    row of zero scores sums to 1. `row_normalise` is added to each row sum before the division.
    Power 4 is faster and suits short rows; power 8 learns better on rows of hundreds of keys.
    """
    if row_normalise is None:
        raise UserError(
            f"row_normalise must be a finite number of at least {LEAST_EPSILON}, got None"
        )
    # The rule refuses other powers.
    is_known = type(power) is int and power in POWERS
    first_gamma, first_threshold = _STARTS[power if is_known else 1]
    return Rectified(
        first_gamma if gamma is None else gamma,
        length_exponent,
        power,
        first_threshold if threshold is None else threshold,
        row_normalise=row_normalise,
    )


def relu_n(*, length_exponent: float = 1.0) -> Rectified:
    """ReLU(s) / n^length_exponent; the paper finds exponents near 1 best."""
    rule = Rectified(length_exponent=length_exponent)
    if length_exponent > 1000:
        raise UserError(f"length_exponent must be at most 1000, got {quote(length_exponent)}")
    return replace(rule, gamma=2.0**length_exponent)


def rela() -> Rectified:
    """ReLU(s), unscaled: the RMSNorm and gate on the output do the normalising."""
    return Rectified(length_exponent=0.0)


def squared_relu() -> Rectified:
    """ReLU(s)^2 / n, the scaling in the text of the GAU paper."""
    return Rectified(gamma=2.0, length_exponent=1.0, power=2)


def squared_relu_n2() -> Rectified:
    """ReLU(s / n)^2 = ReLU(s)^2 / n^2, the scaling in the code of the GAU paper's appendix."""
    return Rectified(gamma=4.0, length_exponent=2.0, power=2)


def leaky_relu(*, negative_slope: float = 0.1, length_exponent: float = 0.5) -> Rectified:
    """LeakyReLU(s) / (n/2)^length_exponent.

    Unconfirmed: the paper's abstract does not state a scale; ours is ReLUFormer's.
    """
    return Rectified(length_exponent=length_exponent, negative_slope=negative_slope)


def cosine_relu(*, temperature: float | Tensor = 1.0) -> Rectified:
    """ReLU(t_h cos(q, k)) over tokens, unnormalised; `temperature` > 0 is a number or [H].

    The paper attends over channels, which would leak the future; ours is over tokens.
    """
    if not isinstance(temperature, Tensor) and not temperature > 0:
        raise UserError(f"temperature must be greater than 0, got {temperature}")
    return Rectified(gamma=1 / temperature, length_exponent=0.0)


def tra(
    scores: Scores, *, beta: float | Tensor = 1.0, kappa: float = 1.0, power: int = 2
) -> Tensor:
    """ReLU(cos(q, k) - tau)^power with tau = beta * sqrt(2 ln(n / kappa) / D).

    The paper's row index i + 1 is n. tau is the level that the largest of n random cosines in D
    dimensions reaches, so that a key must beat chance to be read; `beta` is a number or [H].
    """
    if not kappa > 0:
        raise UserError(f"kappa must be greater than 0, got {kappa}")
    log_n = (scores.n.clamp_min(1) / kappa).log().clamp_min(0)
    return Rectified(
        length_exponent=0.0,
        power=power,
        threshold=(2 * log_n / scores.width).sqrt() * per_head(beta),
    )(scores)


def tda(
    first: Scores,
    *,
    second: Scores,
    lam: float | Tensor = 0.5,
    beta: float | Tensor = 1.0,
    kappa: float = 1.0,
    power: int = 2,
) -> Tensor:
    """tra(s1) - lambda tra(s2), s1 and s2 from the two halves of D.

    `lam` is lambda in (0, 1), a number or one value per head [H]; 0.5 is our choice.
    """
    read_by = partial(tra, beta=beta, kappa=kappa, power=power)
    return read_by(first) - per_head(lam) * read_by(second)
