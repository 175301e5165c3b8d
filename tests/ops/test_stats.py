"""Row statistics against direct computation, and their gradients against differences."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from reluformer import Stats
from reluformer import attention as attend
from reluformer.ops.stats import entropy_from_sums, sum_of_w_log_w, summarise
from tests.ops.inputs import every_attention, gradients, make, tensor_options

attention = partial(attend, impl="reference")
DIFFERENTIABLE = ("row_sum", "entropy", "raw_entropy", "max")


def _direct(weights: list[float]) -> dict[str, float]:
    """The statistics of one row of visible weights, by their definitions."""
    sizes = [abs(w) for w in weights if w]
    total = sum(sizes)
    return {
        "row_sum": total,
        "entropy": -sum(w / total * math.log(w / total) for w in sizes),
        "raw_entropy": -sum(w * math.log(w) for w in sizes),
        "zeros": weights.count(0.0) / max(len(weights), 1),
        "max": max(weights, default=0.0),
        "visible": len(weights),
    }


@every_attention
def test_statistics_are_those_of_the_returned_weights(name: str) -> None:
    q, k, v = make(rows=4)
    mask = torch.rand(2, 4, 4, 5) > 0.3
    mask[1, 2, 3] = False
    result = attention(name, q, k, v, mask=mask, return_weights=True, return_stats=True)
    row_sum = result.weights.abs().sum(dim=-1)
    if name == "normalised_relu":
        # Row sums are those before normalisation.
        before = {"power": 8, "threshold": -8.0, "gamma": 2 * 8.0**8, "length_exponent": 1.0}
        row_sum = attention("relu", q, k, v, mask=mask, return_weights=True, **before).weights
        row_sum = row_sum.sum(dim=-1)
    for index in torch.ones(2, 4, 4).nonzero().tolist():
        place = tuple(index)
        expected = _direct(result.weights[place][mask[place]].tolist())
        expected["row_sum"] = float(row_sum[place])
        for field, value in expected.items():
            found = float(getattr(result.stats, field)[place])
            assert found == pytest.approx(value, rel=1e-9, abs=1e-11), field


@every_attention
def test_gradients_of_statistics_match_finite_differences(name: str) -> None:
    sizes = {"batch": 1, "heads": 2, "kv_heads": 1, "rows": 2, "keys": 3, "value_width": 1}
    q, k, v = make(**sizes, width=4, seed=5)
    q, k = q.requires_grad_(), k.requires_grad_()
    options = tensor_options(name, q, v)

    def run(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        stats = attention(name, q, k, v, causal=True, return_stats=True, **options).stats
        return tuple(getattr(stats, field) for field in DIFFERENTIABLE)

    assert torch.autograd.gradcheck(run, (q, k))


@every_attention
def test_blind_rows_have_zero_statistics_and_gradients(name: str) -> None:
    q, k, v = make(requires_grad=True)
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[1] = False
    stats = attention(name, q, k, v, mask=mask, return_stats=True).stats
    for field in Stats._fields:
        assert not getattr(stats, field)[:, :, 1].any(), field
    blind = torch.stack([getattr(stats, field)[:, :, 1] for field in DIFFERENTIABLE])
    for grad in gradients(blind, [q, k]):
        assert not grad.any()
    rest = torch.stack([getattr(stats, field) for field in DIFFERENTIABLE])
    for grad in gradients(rest, [q, k]):
        assert grad.isfinite().all()


def test_a_dead_row_has_no_entropy_and_passes_no_gradient() -> None:
    weights = torch.tensor([[0.0, 0.0, 0.0], [0.0, 2.0, 2.0]], requires_grad=True)
    stats = summarise(weights, None)
    assert stats.entropy.tolist() == pytest.approx([0.0, math.log(2)])
    assert stats.zeros.tolist() == pytest.approx([1.0, 1 / 3])
    (grad,) = torch.autograd.grad(stats.entropy.sum() + stats.raw_entropy.sum(), weights)
    assert not grad[0].any() and grad.isfinite().all()


def test_a_dead_weight_has_no_slope_in_the_sum_of_w_log_w() -> None:
    """Not the slope ln 0 of the formula, which no weight could follow."""
    weights = torch.tensor([0.0, 0.5], requires_grad=True)
    (grad,) = torch.autograd.grad(sum_of_w_log_w(weights), weights)
    assert grad.tolist() == pytest.approx([0.0, math.log(0.5) + 1])


def test_signed_weights_count_by_size() -> None:
    stats = summarise(torch.tensor([-3.0, 1.0]), None)
    assert float(stats.row_sum) == 4.0
    assert float(stats.entropy) == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    assert float(stats.max) == 1.0


def test_the_largest_of_negative_weights_is_negative() -> None:
    visible = torch.tensor([True, True, False])
    assert float(summarise(torch.tensor([-3.0, -1.0, 0.0]), visible).max) == -1.0


def test_counts_carry_no_gradient() -> None:
    stats = summarise(torch.rand(2, 3, requires_grad=True), None)
    assert not stats.zeros.requires_grad and not stats.visible.requires_grad
    assert all(getattr(stats, field).requires_grad for field in DIFFERENTIABLE)


@pytest.mark.parametrize("size", [1e-40, 1e-33, 1e-30, 1e30])
def test_tiny_and_huge_weights_keep_a_finite_entropy(size: float) -> None:
    weights = torch.full((4,), size, requires_grad=True)
    stats = summarise(weights, None)
    # Rows of weights near the smallest float count as rows without weight.
    expected = math.log(4) if size > 1e-32 else 0.0
    assert stats.entropy.item() == pytest.approx(expected, rel=1e-3)
    (grad,) = torch.autograd.grad(stats.entropy, weights)
    assert grad.isfinite().all()


@every_attention
def test_statistics_of_scores_of_ten_thousand_have_finite_gradients(name: str) -> None:
    q, k, v = make(rows=5, dtype=torch.float32, requires_grad=True)
    # Eighth powers of scores from 65,000 on overflow.
    options = {"power": 4} if name == "normalised_relu" else {}
    for scale in (1e2, 1e4):
        stats = attention(
            name, q, k, v, causal=True, scale=scale, return_stats=True, **options
        ).stats
        for field in DIFFERENTIABLE:
            statistic = getattr(stats, field)
            for tensor in (statistic, *gradients(statistic, [q, k])):
                assert tensor.isfinite().all(), field


def test_entropy_needs_two_sums_only() -> None:
    """The entropy follows from the two sums that a fused kernel keeps per row: w and w ln w."""
    weights = torch.rand(5, 7, dtype=torch.float64)
    shares = weights / weights.sum(-1, keepdim=True)
    entropy = entropy_from_sums(weights.sum(-1), sum_of_w_log_w(weights))
    torch.testing.assert_close(entropy, -(shares * shares.log()).sum(-1))
