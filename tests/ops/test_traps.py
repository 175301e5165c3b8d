"""Mistakes found in published code of these attentions, each as a test that we do not make it."""

import math
from typing import Any

import pytest
import torch

from reluformer import ATTENTIONS, attention, relu_attention
from reluformer.ops.memory import Scores
from tests.ops.inputs import assert_same, every_attention, gradients, make
from tests.ops.oracles import ORACLES, Row

VISIBLE = torch.arange(5) < 3


def _weigh(name: str, scores: list[float], **options: Any) -> list[float]:
    """Weights of one row of visible scores, through the public function."""
    n = len(scores)
    zeros = torch.zeros(1, 1, n, 2, dtype=torch.float64)
    bias = torch.tensor(scores, dtype=torch.float64)
    result = attention(
        name, zeros[:, :, :1], zeros, zeros, bias=bias, return_weights=True, **options
    )
    return result.weights.flatten().tolist()


@pytest.mark.parametrize(
    ("name", "options", "leak"),
    [
        ("sigmoid", {"offset": 0.0}, 0.5),
        ("sigmoid", {"offset": -math.log(2048)}, 4.9e-4),
        ("laplace", {}, 0.006),
        ("relu", {"threshold": -0.7, "length_exponent": 0.0}, 0.7),
        ("relu", {"threshold": -0.7, "power": 2, "length_exponent": 0.0}, 0.49),
        ("relu", {"threshold": 0.7, "negative_slope": 0.1, "length_exponent": 0.0}, -0.07),
    ],
)
def test_masking_by_zero_before_the_activation_leaks(
    name: str, options: dict[str, Any], leak: float
) -> None:
    """Hidden scores are 0 and f(0) is not: only masking the weights keeps hidden keys out."""
    q, k, v = make()
    trap = ATTENTIONS[name].weigh_with(options)(Scores(torch.zeros(3, 5), VISIBLE, 8))
    assert float(trap[0, 4]) == pytest.approx(leak, rel=0.1)
    result = attention(name, q, k, v, mask=VISIBLE, return_weights=True, **options)
    assert not result.weights[..., ~VISIBLE].any()
    short = attention(name, q, k[:, :, :3], v[:, :, :3], **options)
    torch.testing.assert_close(result.output, short)


@every_attention
@pytest.mark.parametrize("level", [-3.0, 3.0])
def test_hidden_keys_stay_out_of_every_row_statistic(name: str, level: float) -> None:
    """With all visible scores on one side, a hidden 0 would be the row's maximum or minimum."""
    q, k, v = make()
    arguments = {"bias": torch.full((1,), level, dtype=q.dtype), "scale": 0.1}
    masked = attention(name, q, k, v, mask=VISIBLE, **arguments)
    short = attention(name, q, k[:, :, :3], v[:, :, :3], **arguments)
    torch.testing.assert_close(masked, short)


@every_attention
def test_a_causal_model_cannot_see_the_future_by_a_late_mask(name: str) -> None:
    """An early FLASH masked the scores after the weights were made from them."""
    q, k, v = make(rows=5, requires_grad=True)
    output = attention(name, q, k, v, causal=True)
    for i in range(5):
        grad_k, grad_v = gradients(output[:, :, i], [k, v])
        assert not grad_k[:, :, i + 1 :].any() and not grad_v[:, :, i + 1 :].any()


def test_laplace_matches_the_squared_relu_in_value_and_slope() -> None:
    point = torch.tensor([[math.sqrt(0.5)]], dtype=torch.float64, requires_grad=True)
    weight = ATTENTIONS["laplace"].weigh_with({})(Scores(point, None, 8))
    (slope,) = torch.autograd.grad(weight.sum(), point)
    assert weight.item() == pytest.approx(0.5)
    assert slope.item() == pytest.approx(math.sqrt(2))
    wrong_deviation = math.sqrt(0.25 * math.pi)
    assert slope.item() != pytest.approx(1 / (wrong_deviation * math.sqrt(2 * math.pi)), rel=0.1)


def test_laplace_divides_the_scores_by_n_inside() -> None:
    assert _weigh("laplace", [8.0] * 4) == pytest.approx(_weigh("laplace", [2.0]) * 4)


def test_ssmax_multiplies_the_scores_by_log_n() -> None:
    """Subtracting s ln n, as one copy does, changes nothing: softmax ignores a shift."""
    scores = [0.3, -1.0, 1.2, 0.0]
    softmax = _weigh("softmax", scores)
    shifted = _weigh("softmax", [s - 0.4 * math.log(4) for s in scores])
    assert shifted == pytest.approx(softmax)
    ours = _weigh("ssmax", scores, temperature=0.4)
    assert ours == pytest.approx(_weigh("softmax", [0.4 * math.log(4) * s for s in scores]))
    assert ours != pytest.approx(softmax, rel=0.1)


def test_ssmax_holds_its_sharpness_as_the_row_grows() -> None:
    """One key stands out by a fixed margin: softmax loses it in a crowd, SSMax does not."""
    shares = {name: [] for name in ("softmax", "ssmax")}
    for n in (16, 4096):
        scores = [2.0] + [0.0] * (n - 1)
        for name, found in shares.items():
            found.append(_weigh(name, scores)[0])
    assert shares["softmax"][1] < 0.01 < 0.9 < shares["ssmax"][1]


def test_the_scalings_of_squared_relu_have_names_of_their_own() -> None:
    scores = [0.5, -1.0, 2.0, 1.0]
    text, appendix = _weigh("squared_relu", scores), _weigh("squared_relu_n2", scores)
    assert text == pytest.approx([0.25 / 4, 0, 4 / 4, 1 / 4])
    assert appendix == pytest.approx([0.25 / 16, 0, 4 / 16, 1 / 16])


def test_softpick_counts_negative_scores_in_its_denominator_but_no_hidden_ones() -> None:
    scores = [1.0, -2.0, 0.5]
    total = sum(abs(math.exp(s) - 1) for s in scores) + 1e-6
    expected = [(math.e - 1) / total, 0.0, (math.exp(0.5) - 1) / total]
    assert _weigh("softpick", scores) == pytest.approx(expected)
    with_hidden = _weigh("softpick", [*scores, 5.0, -5.0], mask=VISIBLE)
    assert with_hidden == pytest.approx([*expected, 0.0, 0.0])


def test_softpick_is_no_softmax_times_sigmoid() -> None:
    weights = _weigh("softpick", [-1.0, -0.2, 0.0])
    assert weights == [0.0, 0.0, 0.0]


def test_softpick_keeps_its_epsilon_under_the_shift() -> None:
    """Numerator, denominator and epsilon shrink by the same e^-m, for small and for large m."""
    for scores in ([1e-7, -1e-7], [3.0, -1.0], [30.0, 29.0], [-30.0, 1e-6]):
        expected = ORACLES["softpick"].weigh(Row(scores, 2))
        assert _weigh("softpick", scores) == pytest.approx(expected, rel=1e-6)
    assert _weigh("softpick", [1e4, -1e4, 1e4]) == pytest.approx([0.5, 0.0, 0.5])


def test_the_sigmoid_bias_is_per_row_or_fixed() -> None:
    q, k, v = make(rows=5)
    fixed = attention("sigmoid", q, k, v, causal=True, offset=-math.log(5))
    per_row = attention("sigmoid", q, k, v, causal=True)
    torch.testing.assert_close(fixed[:, :, -1], per_row[:, :, -1])
    assert (fixed[:, :, :-1] - per_row[:, :, :-1]).abs().amax(dim=(0, 1, 3)).min() > 0.01


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_lssar_survives_its_fifteenth_power(dtype: torch.dtype) -> None:
    q, k, v = make(batch=1, rows=2, keys=4096, width=64, dtype=dtype, requires_grad=True)
    result = attention("lssar", q, k, v, power=15.0, return_stats=True)
    row_sum = result.stats.row_sum
    torch.testing.assert_close(row_sum, torch.ones_like(row_sum))
    for tensor in (result.output, *gradients(result.output, [q, k, v])):
        assert tensor.isfinite().all()


def test_lssar_drops_its_offset_in_rows_of_up_to_three_keys() -> None:
    for n in (1, 2, 3, 4):
        weights = _weigh("lssar", [0.9, -0.9, 0.1, 0.3][:n])
        assert all(w > 0 for w in weights) is (n <= 3)
        assert sum(weights) == pytest.approx(1)


@pytest.mark.parametrize("name", ["ssmax", "lssa", "lssar"])
def test_a_single_key_gets_all_the_weight_although_log_n_is_zero(name: str) -> None:
    assert _weigh(name, [-0.7]) == [1.0]


def test_the_threshold_of_a_single_key_is_zero() -> None:
    """tau = beta sqrt(2 ln n / D): at n = 1 every positive cosine passes."""
    assert _weigh("tra", [0.1]) == pytest.approx([0.01])
    assert _weigh("tra", [0.1, 0.1]) == [0.0, 0.0]
    assert _weigh("sigmoid", [0.0]) == [0.5]


def test_n_comes_from_the_mask_and_not_from_the_shape() -> None:
    q, k, v = make()
    padded = relu_attention(q, k, v, key_lengths=torch.tensor([3, 3]))
    short = relu_attention(q, k[:, :, :3], v[:, :, :3])
    torch.testing.assert_close(padded, short)
    by_shape = relu_attention(q, k, v * VISIBLE[:, None])
    torch.testing.assert_close(by_shape * math.sqrt(5 / 3), short)


def test_an_option_of_zero_is_not_an_option_left_out() -> None:
    q, k, v = make()
    assert_same(attention("sink", q, k, v, sink=0.0), attention("softmax1", q, k, v))
    assert not torch.allclose(
        attention("sigmoid", q, k, v, offset=0.0), attention("sigmoid", q, k, v)
    )
