"""Sparsemax and entmax against the published package and by their defining properties."""

from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from reluformer import attention
from reluformer.ops.family import sparse
from reluformer.ops.memory import Scores
from reluformer.ops.rule import Rectified
from tests.ops.inputs import gradients, make


@pytest.fixture(scope="module")
def package() -> ModuleType:
    """The authors' own implementation."""
    return pytest.importorskip("entmax")


def _logits(rows: int = 40, keys: int = 30) -> Tensor:
    spread = torch.linspace(-2, 2, rows, dtype=torch.float64).exp().unsqueeze(-1)
    return (spread * torch.randn(rows, keys, dtype=torch.float64)).requires_grad_()


@pytest.mark.parametrize("name", ["sparsemax", "entmax15"])
def test_outputs_and_gradients_agree_with_the_package(name: str, package: ModuleType) -> None:
    logits = _logits()
    ours, theirs = getattr(sparse, name)(Scores(logits, None, 8)), getattr(package, name)(logits)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    torch.testing.assert_close(
        gradients(ours, [logits]), gradients(theirs, [logits]), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("alpha", [1.05, 1.2, 1.5, 1.7, 2.0])
def test_outputs_and_gradients_agree_with_bisection(alpha: float, package: ModuleType) -> None:
    logits, steepness = _logits(), torch.tensor(alpha, dtype=torch.float64, requires_grad=True)
    ours = sparse.entmax(Scores(logits, None, 8), alpha=steepness)
    theirs = package.entmax_bisect(logits, steepness.expand(40, 1), n_iter=60)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    torch.testing.assert_close(
        gradients(ours, [logits, steepness]),
        gradients(theirs, [logits, steepness]),
        rtol=1e-6,
        atol=1e-6,
    )


def test_attention_agrees_with_the_package_under_a_mask(package: ModuleType) -> None:
    q, k, v = make(kv_heads=4, rows=6, keys=9, requires_grad=True)
    mask = torch.rand(2, 1, 6, 9) > 0.4
    mask[..., 0] = True
    scores = (q @ k.mT / 8**0.5).masked_fill(~mask, -1e9)
    for name in ("sparsemax", "entmax15"):
        ours = attention(name, q, k, v, mask=mask)
        theirs = getattr(package, name)(scores, dim=-1) @ v
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
        for one, other in zip(
            gradients(ours, [q, k, v]), gradients(theirs, [q, k, v]), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=12),
    st.sampled_from([1.05, 1.3, 1.5, 1.9, 2.0]),
)
def test_weights_lie_on_the_simplex_for_any_scores(scores: list[float], alpha: float) -> None:
    values = torch.tensor([scores], dtype=torch.float32)
    weights = sparse.entmax(Scores(values, None, 8), alpha=alpha)
    assert (weights >= 0).all()
    assert float(weights.sum()) == pytest.approx(1, abs=1e-5)
    order = values.argsort(dim=-1)
    assert (weights.gather(-1, order).diff() >= 0).all()


@pytest.mark.parametrize("alpha", [1.02, 1.5, 2.0])
def test_the_threshold_is_found_however_the_scores_are_spread(alpha: float) -> None:
    """Geometric and dense spreads make Newton's method shed the most keys, one step at a time."""
    keys = torch.arange(4096, dtype=torch.float64)
    rows = [-keys / 4096, -(2.0 ** -(keys % 60)), -keys.sqrt(), torch.zeros(4096).double()]
    weights = sparse.entmax(Scores(torch.stack(rows), None, 8), alpha=alpha)
    torch.testing.assert_close(weights.sum(-1), torch.ones(4).double(), rtol=0, atol=1e-9)


@pytest.mark.parametrize(("name", "slope", "power"), [("sparsemax", 1.0, 1), ("entmax15", 0.5, 2)])
def test_entmax_is_the_rectified_rule_once_its_threshold_is_known(
    name: str, slope: float, power: int
) -> None:
    scores = Scores(_logits(), torch.rand(40, 30) > 0.3, 8)
    weights = getattr(sparse, name)(scores)
    top = weights.masked_fill(~scores.visible, -1).argmax(-1, keepdim=True)
    best = slope * scores.values.gather(-1, top)
    threshold = best - weights.gather(-1, top) ** (1 / power)
    rule = Rectified(length_exponent=0.0, power=power, threshold=threshold)
    again = rule(scores.times(slope)) * scores.visible
    torch.testing.assert_close(again, weights, rtol=1e-9, atol=1e-12)


def test_alpha_spans_from_softmax_to_sparsemax() -> None:
    q, k, v = make()
    softmax = attention("softmax", q, k, v)
    almost = attention("entmax", q, k, v, alpha=1.0001)
    torch.testing.assert_close(almost, softmax, rtol=0, atol=1e-3)
    zeros = [
        float(attention("entmax", q, k, v, alpha=alpha, return_stats=True).stats.zeros.mean())
        for alpha in (1.1, 1.5, 2.0)
    ]
    assert zeros == sorted(zeros) and zeros[0] < zeros[-1]


def test_a_hidden_key_leaves_the_gradient_of_alpha_finite() -> None:
    q, k, v = make()
    alpha = torch.full((4,), 1.5, dtype=q.dtype, requires_grad=True)
    output = attention(
        "entmax", q, k, v, alpha=alpha, causal=True, key_lengths=torch.tensor([5, 0])
    )
    (grad,) = gradients(output, [alpha])
    assert grad.isfinite().all() and grad.all()
