"""The rectified rule: one formula that covers the ReLU family."""

import sys
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from reluformer.errors import UserError, quote
from reluformer.ops.memory import Scores, hide

POWERS = (1, 2, 4, 8)
"""Powers of a rectified rule; every backend supports them."""
LARGEST = sys.float_info.max
"""Largest finite number; also compared with integers, which may be larger."""
LEAST_EPSILON = 1e-30
"""Smallest `row_normalise`: float32 can divide by it in rows whose weights are all zero."""
POWERS_IN_WORDS = f"{', '.join(map(str, POWERS[:-1]))} or {POWERS[-1]}"


@dataclass(frozen=True)
class Rectified:
    """w = f(s - threshold)^power / (gamma * (n / 2)^length_exponent), f a (leaky) ReLU.

    With unit-variance scores the sum of n rectified values has variance n/2, so exponent 0.5 keeps
    the output's variance at 1 for every length (ReLUFormer, Eq. 6). Exponent 1 with gamma 2 is
    ReLU/n (Wortsman et al. 2023), exponent 0 is plain ReLU. A negative threshold admits keys. The
    power is 1, 2, 4 or 8.

    gamma and threshold are numbers or tensors of one value per head, [H]; a threshold may also be
    one per row, broadcastable to [B, H, Tq, 1]. With `row_normalise`, each row is divided by its
    sum plus that number: keys compete, as in softmax, without exponentials or a maximum.
    """

    gamma: float | Tensor = 1.0
    length_exponent: float = 0.5
    power: int = 1
    threshold: float | Tensor = 0.0
    negative_slope: float = 0.0
    row_normalise: float | None = None

    def __post_init__(self) -> None:
        for name in ("length_exponent", "negative_slope", "row_normalise"):
            value = getattr(self, name)
            if not (isinstance(value, Real) or (value is None and name == "row_normalise")):
                raise UserError(f"{name} must be a number, got {quote(value)}")
        if not isinstance(self.gamma, Tensor) and not 0 < self.gamma <= LARGEST:
            raise UserError(
                f"gamma must be a finite number greater than 0, got {quote(self.gamma)}"
            )
        if not isinstance(self.threshold, Tensor) and not abs(self.threshold) <= LARGEST:
            raise UserError(f"threshold must be a finite number, got {quote(self.threshold)}")
        if type(self.power) is not int or self.power not in POWERS:
            raise UserError(f"power must be {POWERS_IN_WORDS}, got {quote(self.power)}")
        if not 0 <= self.length_exponent <= LARGEST:
            raise UserError(
                f"length_exponent must be finite and >= 0, got {quote(self.length_exponent)}"
            )
        if not 0 <= self.negative_slope < 1:
            raise UserError(f"negative_slope must be in [0, 1), got {quote(self.negative_slope)}")
        if self.row_normalise is not None and not LEAST_EPSILON <= self.row_normalise <= LARGEST:
            raise UserError(
                f"row_normalise must be a finite number of at least {LEAST_EPSILON}, "
                f"got {quote(self.row_normalise)}"
            )
        if self.row_normalise is not None and self.negative_slope > 0:
            raise UserError(
                f"row_normalise needs negative_slope to be 0, because rows could sum to 0, "
                f"got {quote(self.negative_slope)}"
            )

    @property
    def has_tensors(self) -> bool:
        """Whether gamma or threshold is a tensor."""
        return isinstance(self.gamma, Tensor) or isinstance(self.threshold, Tensor)

    def __call__(self, scores: Scores) -> Tensor:
        """Weights [..., Tq, Tk]."""
        shifted = scores.values
        if isinstance(self.threshold, Tensor) or self.threshold != 0:
            shifted = shifted - per_head(self.threshold)
        if self.negative_slope > 0:
            active = torch.nn.functional.leaky_relu(shifted, self.negative_slope)
        else:
            active = torch.relu(shifted)
        active = raised(active, self.power)
        scale = self.row_scale(scores)
        # Each pass over the weights costs time; plain ReLU memories need no scale.
        weights = active if isinstance(scale, float) and scale == 1 else active * scale
        if self.row_normalise is None:
            return weights
        weights = hide(weights, scores.visible)
        return weights / (weights.sum(dim=-1, keepdim=True) + self.row_normalise)

    def row_scale(self, scores: Scores) -> Tensor | float:
        """c = 1 / (gamma * (n/2)^length_exponent), broadcastable to [B, H, Tq, 1]."""
        if self.length_exponent == 0:
            return 1 / per_head(self.gamma)
        return self.scale_of(scores.n)

    def scale_of(self, n: Tensor) -> Tensor:
        """c of rows that see n keys, n [..., Tq, 1] in a floating-point dtype."""
        # A row that sees nothing has no weight to scale; n = 1 there keeps the division finite.
        return (n.clamp_min(1) / 2) ** -self.length_exponent / per_head(self.gamma)


RELU = Rectified(length_exponent=0.0)
"""Plain ReLU: max(s, 0)."""


def raised(x: Tensor, power: int) -> Tensor:
    """x^power, a power of `POWERS` or one less; x itself for 1.

    Products of squares are faster than `**`.
    """
    if power == 1:
        return x
    square = x.square()
    if power <= 3:
        return square if power == 2 else square * x
    fourth = square.square()
    if power == 4:
        return fourth
    return fourth.square() if power == 8 else fourth * square * x


def per_head(value: float | Tensor) -> float | Tensor:
    """A number as it is; one value per head [H] as [H, 1, 1], to broadcast to [B, H, Tq, Tk]."""
    if isinstance(value, Tensor) and value.dim() == 1:
        return value.view(-1, 1, 1)
    return value
