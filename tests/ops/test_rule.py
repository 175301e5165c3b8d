"""The rectified rule by itself."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reluformer.errors import UserError
from reluformer.ops.memory import Scores
from reluformer.ops.rule import POWERS, Rectified, per_head


@given(
    gamma=st.floats(0.1, 10),
    length_exponent=st.floats(0, 2),
    power=st.sampled_from(POWERS),
    threshold=st.floats(-2, 2),
    negative_slope=st.floats(0, 0.9),
    n=st.integers(0, 6),
)
def test_weights_follow_the_formula(
    gamma: float,
    length_exponent: float,
    power: int,
    threshold: float,
    negative_slope: float,
    n: int,
) -> None:
    values = torch.linspace(-3, 3, 6, dtype=torch.float64)
    rule = Rectified(gamma, length_exponent, power, threshold, negative_slope)
    weights = rule(Scores(values.expand(1, 6), torch.arange(6) < n, 4))[0]
    for s, w in zip(values.tolist()[:n], weights.tolist()[:n], strict=True):
        x = s - threshold
        active = (x if x > 0 else negative_slope * x) ** power
        assert w == pytest.approx(active / (gamma * (n / 2) ** length_exponent))
    assert weights.isfinite().all()


@pytest.mark.parametrize("power", POWERS)
@pytest.mark.parametrize("negative_slope", [0.0, 0.3])
def test_gradients_of_scores_gamma_and_threshold(power: int, negative_slope: float) -> None:
    torch.manual_seed(0)
    visible = torch.arange(5) < torch.tensor([5, 3, 0])[:, None]

    def weigh(values: torch.Tensor, gamma: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
        rule = Rectified(gamma, 0.5, power, threshold, negative_slope)
        return rule(Scores(values, visible, 4)) * visible

    values = torch.randn(1, 2, 3, 5, dtype=torch.float64, requires_grad=True)
    gamma = torch.tensor([0.7, 1.6], dtype=torch.float64, requires_grad=True)
    threshold = torch.tensor([-float(power), 0.2], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(weigh, (values, gamma, threshold))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gamma": 0}, "gamma must be a finite number greater than 0, got 0"),
        ({"gamma": -1.0}, "gamma must be a finite number greater than 0, got -1.0"),
        ({"gamma": math.nan}, "gamma must be a finite number greater than 0, got nan"),
        ({"gamma": math.inf}, "gamma must be a finite number greater than 0, got inf"),
        ({"power": 5}, "power must be 1, 2, 4 or 8, got 5"),
        ({"power": 0}, "power must be 1, 2, 4 or 8, got 0"),
        ({"power": 1.5}, "power must be 1, 2, 4 or 8, got 1.5"),
        ({"length_exponent": -0.5}, "length_exponent must be finite and >= 0, got -0.5"),
        ({"length_exponent": math.nan}, "length_exponent must be finite and >= 0, got nan"),
        ({"threshold": math.inf}, "threshold must be a finite number, got inf"),
        ({"negative_slope": 1.0}, "negative_slope must be in [0, 1), got 1.0"),
        ({"negative_slope": -0.1}, "negative_slope must be in [0, 1), got -0.1"),
    ],
)
def test_fields_out_of_range_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        Rectified(**fields)
    assert str(caught.value) == message


def test_a_value_per_head_meets_its_head() -> None:
    scores = Scores(torch.ones(2, 3, 4, 5), None, 8)
    gamma, threshold = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0.0, 0.5, -1.0])
    weights = Rectified(gamma, 0.0, 1, threshold)(scores)
    for head, expected in enumerate([1.0, 0.25, 0.5]):
        assert (weights[:, head] == expected).all()
    assert per_head(gamma).shape == (3, 1, 1)
    assert per_head(torch.tensor(2.0)).shape == ()
    assert per_head(2.0) == 2.0


def test_a_threshold_per_row_meets_its_row() -> None:
    threshold = torch.tensor([0.0, 0.5]).view(2, 1)
    weights = Rectified(length_exponent=0.0, threshold=threshold)(
        Scores(torch.ones(1, 1, 2, 3), None, 8)
    )
    assert weights[0, 0].tolist() == [[1.0] * 3, [0.5] * 3]


def test_the_row_scale_uses_the_visible_keys_and_survives_none() -> None:
    visible = torch.tensor([[True] * 8, [True] * 2 + [False] * 6, [False] * 8])
    scores = Scores(torch.ones(1, 1, 3, 8), visible, 4)
    scale = Rectified(gamma=2.0).row_scale(scores)
    assert scale.flatten().tolist() == pytest.approx([1 / (2 * 2), 1 / 2, 1 / (2 * 0.5**0.5)])
    assert Rectified(gamma=4.0, length_exponent=0.0).row_scale(scores) == 0.25
