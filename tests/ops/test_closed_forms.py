"""The paper's analysis by simulation: N(0, 1) scores and values, n keys."""

import math

import pytest
import torch
from torch import Tensor

from reluformer import AttentionResult, attention

LENGTHS = [256, 1024]


def _simulate(name: str, n: int, rows: int = 500, **options: float) -> AttentionResult:
    """Attend with exactly normal scores: they come in as the bias of zero queries and keys."""
    q, k = torch.zeros(rows, 1, 1, 1), torch.zeros(rows, 1, n, 1)
    v, scores = torch.randn(rows, 1, n, 8), torch.randn(rows, 1, 1, n)
    return attention(name, q, k, v, bias=scores, return_stats=True, **options)


def _mean(statistic: Tensor) -> float:
    return float(statistic.mean())


@pytest.mark.parametrize("n", LENGTHS)
def test_the_variance_of_plain_relu_is_half_of_n(n: int) -> None:
    output = _simulate("relu", n, length_exponent=0.0).output
    assert _mean(output) == pytest.approx(0, abs=0.1 * math.sqrt(n / 2))
    assert float(output.var()) == pytest.approx(n / 2, rel=0.1)


@pytest.mark.parametrize("n", [8, 32, *LENGTHS])
def test_the_scale_keeps_the_variance_at_one_for_every_length(n: int) -> None:
    assert float(_simulate("relu", n, rows=1000).output.var()) == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("n", LENGTHS)
def test_the_variance_of_softmax_is_e_over_n(n: int) -> None:
    output = _simulate("softmax", n).output
    assert float(output.var()) == pytest.approx(math.e / n, rel=0.1)


@pytest.mark.parametrize("n", LENGTHS)
def test_relu_over_n_has_a_row_sum_of_its_own_and_a_vanishing_variance(n: int) -> None:
    result = _simulate("relu_n", n)
    assert _mean(result.stats.row_sum) == pytest.approx(1 / math.sqrt(2 * math.pi), rel=0.02)
    assert float(result.output.var()) == pytest.approx(0.5 / n, rel=0.1)


@pytest.mark.parametrize("gamma", [1.0, 2.5])
@pytest.mark.parametrize("n", LENGTHS)
def test_row_sums_start_at_the_root_of_n_over_pi(n: int, gamma: float) -> None:
    stats = _simulate("relu", n, gamma=gamma).stats
    assert _mean(stats.row_sum) == pytest.approx(math.sqrt(n / math.pi) / gamma, rel=0.02)
    loss = _mean(stats.row_sum.log().abs())
    assert loss == pytest.approx(abs(0.5 * math.log(n / math.pi) - math.log(gamma)), abs=0.02)


@pytest.mark.parametrize("n", LENGTHS)
def test_entropies(n: int) -> None:
    relu, softmax = _simulate("relu", n).stats, _simulate("softmax", n).stats
    normalised, total = math.log(n) - 0.977, math.sqrt(n / math.pi)
    assert _mean(relu.entropy) == pytest.approx(normalised, abs=0.02)
    assert _mean(relu.raw_entropy) == pytest.approx(
        total * (normalised - math.log(total)), rel=0.02
    )
    assert _mean(softmax.entropy) == pytest.approx(math.log(n) - 0.5, abs=0.02)
    torch.testing.assert_close(softmax.entropy, softmax.raw_entropy, rtol=1e-4, atol=1e-4)
    # The entropy loss is active from the start: the margin C = 0.7 ln n lies below.
    assert _mean(relu.entropy) > 0.7 * math.log(n)


@pytest.mark.parametrize("n", LENGTHS)
def test_half_of_the_weights_start_at_zero(n: int) -> None:
    assert _mean(_simulate("relu", n).stats.zeros) == pytest.approx(0.5, abs=0.01)


def test_the_values_tabulated_for_thirty_two_keys() -> None:
    relu, softmax = _simulate("relu", 32, rows=4000), _simulate("softmax", 32, rows=4000)
    assert _mean(relu.stats.row_sum) == pytest.approx(3.19, abs=0.03)
    assert _mean(relu.stats.entropy) == pytest.approx(2.49, abs=0.03)
    assert _mean(relu.stats.raw_entropy) == pytest.approx(4.24, abs=0.08)
    assert _mean(softmax.stats.entropy) == pytest.approx(3.01, abs=0.02)
    assert float(softmax.output.var()) == pytest.approx(0.072, rel=0.05)


def test_plain_relu_grows_with_the_length_and_the_scaled_one_does_not() -> None:
    lengths = [64, 256, 1024]
    plain = [float(_simulate("relu", n, length_exponent=0.0).output.var()) for n in lengths]
    scaled = [float(_simulate("relu", n).output.var()) for n in lengths]
    assert plain[1] > 3 * plain[0] and plain[2] > 3 * plain[1]
    assert max(scaled) < 1.15 * min(scaled)


def test_the_scale_is_per_row_under_a_causal_mask() -> None:
    """Every row of a causal map has unit variance, however few keys it sees."""
    rows = 128
    q, k = torch.zeros(200, 1, rows, 1), torch.zeros(200, 1, rows, 1)
    v, scores = torch.randn(200, 1, rows, 16), torch.randn(200, 1, rows, rows)
    variance = attention("relu", q, k, v, bias=scores, causal=True).var(dim=(0, 1, 3))
    for few, many in ((1, 4), (4, 16), (16, 64), (64, 128)):
        assert float(variance[few:many].mean()) == pytest.approx(1, abs=0.15)
