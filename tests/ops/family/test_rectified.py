"""Identities of the rectified attentions."""

import math

import pytest
import torch

from reluformer import ATTENTIONS, attention, relu_attention
from tests.ops.inputs import every_attention, make

DEGREES = {"relu": 1, "relu_n": 1, "leaky_relu": 1, "squared_relu": 2, "squared_relu_n2": 2}


@every_attention
def test_a_factor_between_query_and_key_cancels(name: str) -> None:
    q, k, v = make()
    torch.testing.assert_close(attention(name, 3 * q, k / 3, v), attention(name, q, k, v))


@pytest.mark.parametrize("name", DEGREES)
def test_a_factor_between_key_and_value_cancels(name: str) -> None:
    """(K c, V / c) is the same ReLU memory, for every c > 0; a squared one needs V / c^2."""
    q, k, v = make()
    plain = attention(name, q, k, v, causal=True)
    for c in (0.2, 7.0):
        scaled = attention(name, q, c * k, v / c ** DEGREES[name], causal=True)
        torch.testing.assert_close(scaled, plain)


@pytest.mark.parametrize("name", ["softmax", "sigmoid", "sparsemax", "softpick"])
def test_a_factor_between_key_and_value_changes_other_memories(name: str) -> None:
    q, k, v = make()
    assert not torch.allclose(attention(name, q, 7 * k, v / 7), attention(name, q, k, v), rtol=0.1)


def test_rela_ignores_the_scale_of_its_scores() -> None:
    q, k, v = make()
    torch.testing.assert_close(
        attention("rela", 5 * q, k, v), attention("rela", q, k, v), rtol=1e-4, atol=1e-6
    )


def test_relatives_are_relu_attention_with_other_options() -> None:
    q, k, v = make()
    for name, options in {
        "relu_n": {"length_exponent": 1.0, "gamma": 2.0},
        "squared_relu": {"length_exponent": 1.0, "gamma": 2.0, "power": 2},
        "squared_relu_n2": {"length_exponent": 2.0, "gamma": 4.0, "power": 2},
        "leaky_relu": {"negative_slope": 0.1},
    }.items():
        ours = relu_attention(q, k, v, causal=True, **options)
        torch.testing.assert_close(attention(name, q, k, v, causal=True), ours)
    torch.testing.assert_close(
        attention("relu_n", q, k, v, length_exponent=0.5), relu_attention(q, k, v, gamma=2**0.5)
    )


def test_the_two_squared_scalings_differ_by_n() -> None:
    q, k, v = make(rows=5)
    text, appendix = (
        attention(name, q, k, v, causal=True) for name in ("squared_relu", "squared_relu_n2")
    )
    n = torch.arange(1, 6, dtype=q.dtype).view(5, 1)
    torch.testing.assert_close(appendix * n, text)


def test_gamma_divides_the_weights_of_its_head() -> None:
    q, k, v = make()
    gamma = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=q.dtype)
    plain = relu_attention(q, k, v)
    torch.testing.assert_close(relu_attention(q, k, v, gamma=gamma) * gamma.view(4, 1, 1), plain)
    torch.testing.assert_close(relu_attention(q, k, v, gamma=torch.tensor(3.0)) * 3, plain)


def test_a_negative_threshold_opens_keys_below_zero() -> None:
    q, k, v = make()
    counts = [
        int((relu_attention(q, k, v, threshold=t, return_weights=True).weights > 0).sum())
        for t in (0.5, 0.0, -0.5, -100.0)
    ]
    assert counts == sorted(counts) and counts[-1] == 2 * 4 * 3 * 5


def test_a_leaky_slope_makes_weights_signed() -> None:
    q, k, v = make()
    weights = relu_attention(q, k, v, negative_slope=0.5, return_weights=True).weights
    exact = relu_attention(q, k, v, return_weights=True).weights
    scores = q @ k.repeat_interleave(2, dim=1).mT / 8**0.5
    torch.testing.assert_close(weights - exact, 0.5 * scores.clamp_max(0) / (5 / 2) ** 0.5)


def test_the_threshold_of_tra_is_the_reach_of_chance() -> None:
    """Hardly one of n random cosines in D dimensions passes tau = sqrt(2 ln n / D)."""
    q, k, v = (torch.randn(8, 1, 64, 64) for _ in range(3))
    weights = attention("tra", q, k, v, return_weights=True).weights
    assert float((weights > 0).sum(-1).float().mean()) < 1
    lower = attention("tra", q, k, v, beta=0.5, return_weights=True).weights
    assert (lower > 0).sum() > 2 * (weights > 0).sum()
    tau = math.sqrt(2 * math.log(64) / 64)
    cosines = torch.nn.functional.cosine_similarity(q.unsqueeze(3), k.unsqueeze(2), dim=-1)
    torch.testing.assert_close(weights, (cosines - tau).relu().square(), rtol=1e-3, atol=1e-6)


def test_a_beta_per_head_meets_its_head() -> None:
    q, k, v = make()
    beta = torch.tensor([0.0, 0.3, 0.6, 0.9], dtype=q.dtype)
    together = attention("tra", q, k, v, causal=True, beta=beta)
    for head, value in enumerate(beta.tolist()):
        alone = attention("tra", q, k, v, causal=True, beta=value)
        torch.testing.assert_close(together[:, head], alone[:, head])


def test_kappa_above_n_leaves_no_threshold() -> None:
    q, k, v = make()
    open_ = attention("tra", q, k, v, kappa=100.0)
    torch.testing.assert_close(open_, attention("tra", q, k, v, beta=0.0))


def test_tda_without_its_second_map_is_tra_of_the_first_half() -> None:
    q, k, v = make()
    first = attention("tra", q[..., :4], k[..., :4], v)
    torch.testing.assert_close(attention("tda", q, k, v, lam=0.0), first)


def test_cosine_relu_multiplies_by_its_temperature() -> None:
    q, k, v = make()
    temperature = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=q.dtype)
    plain = attention("cosine_relu", q, k, v)
    hot = attention("cosine_relu", q, k, v, temperature=temperature)
    torch.testing.assert_close(hot, plain * temperature.view(4, 1, 1))


def test_every_rule_says_what_a_fused_kernel_needs() -> None:
    for name, row in ATTENTIONS.items():
        if row.rule is not None:
            rule = row.weigh_with({})
            assert rule.power in (1, 2, 4, 8) and rule.gamma > 0, name
