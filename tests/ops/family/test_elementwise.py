"""Weights of one score at a time, and the stick that is broken key by key."""

import math

import pytest
import torch

from reluformer import attention
from reluformer.ops.family import elementwise
from reluformer.ops.memory import Scores, hide
from tests.ops.inputs import make


def test_a_stick_is_never_longer_than_one_and_what_is_left_is_the_product() -> None:
    values = 3 * torch.randn(20, 9, dtype=torch.float64)
    weights = elementwise.stick_breaking(Scores(values, None, 8))
    left = torch.sigmoid(-values).prod(-1)
    torch.testing.assert_close(1 - weights.sum(-1), left)
    assert (weights >= 0).all()


def test_the_last_key_breaks_the_stick_first() -> None:
    weights = elementwise.stick_breaking(Scores(torch.tensor([[0.0, 0.0, 0.0]]), None, 8))
    assert weights[0].tolist() == pytest.approx([1 / 8, 1 / 4, 1 / 2])


def test_a_long_stick_keeps_its_digits() -> None:
    """A large score must not cost the keys after it their precision."""
    values = torch.tensor([[1e4, -2.0, -3.0]], dtype=torch.float32)
    weights = elementwise.stick_breaking(Scores(values, None, 8))[0]
    second, third = 1 / (1 + math.exp(2)), 1 / (1 + math.exp(3))
    expected = [(1 - second) * (1 - third), second * (1 - third), third]
    assert weights.tolist() == pytest.approx(expected, rel=1e-6)


def test_hidden_keys_break_nothing_off_the_stick() -> None:
    q, k, v = make()
    mask = torch.tensor([True, False, True, False, True])
    masked = attention("stick_breaking", q, k, v, mask=mask)
    short = attention("stick_breaking", q, k[:, :, mask], v[:, :, mask])
    torch.testing.assert_close(masked, short)


def test_an_offset_per_head_meets_its_head() -> None:
    q, k, v = make()
    offset = torch.tensor([-3.0, -1.0, 0.0, 2.0], dtype=q.dtype)
    together = attention("sigmoid", q, k, v, offset=offset)
    for head, value in enumerate(offset.tolist()):
        alone = attention("sigmoid", q, k, v, offset=value)
        torch.testing.assert_close(together[:, head], alone[:, head])


def test_polynomial_weights_keep_or_lose_their_sign_with_the_power() -> None:
    scores = Scores(torch.tensor([[-2.0, 1.0, 3.0, 0.0]]), None, 8)
    assert elementwise.polynomial(scores)[0].tolist() == [-4.0, 0.5, 13.5, 0.0]
    assert elementwise.polynomial(scores, power=2)[0].tolist() == [2.0, 0.5, 4.5, 0.0]


def test_laplace_is_a_soft_step_between_zero_and_one() -> None:
    values = torch.linspace(-40, 40, 9, dtype=torch.float64).unsqueeze(-1)
    weights = elementwise.laplace(Scores(values, None, 8)).flatten()
    assert (weights.diff() >= 0).all()
    assert weights[0] == 0 and weights[-1] == 1


def test_activations_of_feed_forward_memories() -> None:
    scores = Scores(torch.tensor([[-1.0, 0.0, 2.0]], dtype=torch.float64), None, 8)
    normal = [0.5 * (1 + math.erf(x / math.sqrt(2))) for x in (-1.0, 0.0, 2.0)]
    assert elementwise.gelu(scores)[0].tolist() == pytest.approx([-normal[0], 0, 2 * normal[2]])
    logistic = [1 / (1 + math.exp(-x)) for x in (-1.0, 0.0, 2.0)]
    assert elementwise.silu(scores)[0].tolist() == pytest.approx([-logistic[0], 0, 2 * logistic[2]])


def test_silu_divides_by_the_visible_keys_and_is_signed() -> None:
    values = torch.tensor([[-1.0, 0.0, 2.0, 9.0]], dtype=torch.float64)
    visible = torch.tensor([[True, True, True, False]])
    weights = elementwise.silu_n(Scores(hide(values, visible), visible, 8))[0, :3] * 3
    expected = [-1 / (1 + math.e), 0.0, 2 / (1 + math.exp(-2))]
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64))
    least = elementwise.silu_n(Scores(torch.linspace(-9, 9, 4001).double()[:, None], None, 8)).min()
    assert -0.2785 < least < -0.278
