"""Divergence is detected within an interval, and a diverged state is never saved."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from reluformer import checkpoint
from reluformer.train import Diverged, loop, train, trainer_state
from reluformer.train.attention_stats import IntervalLosses, SiteStatistics
from reluformer.train.divergence import Guard
from tests.train.tiny import tiny

HEALTHY = SiteStatistics(row_sum=0.9, entropy=2.0, zeros=0.6, dead_rows=0.0)
COLLAPSED = SiteStatistics(row_sum=1.0, entropy=0.02, zeros=0.98, dead_rows=0.0)


def losses(nll: float = 3.0, **others: float) -> IntervalLosses:
    values = dict.fromkeys(IntervalLosses._fields, 0.1) | {"loss": nll, "nll": nll}
    return IntervalLosses(**{**values, **others})


@pytest.mark.parametrize("name", ["loss", "grad_norm", "normalisation"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_raise_with_step_and_statistics(name: str, value: float) -> None:
    with pytest.raises(Diverged, match=rf"step 70: {name} is (nan|inf) \| cross sum 0.90 H 2.00"):
        Guard(None).check(70, losses(**{name: value}), {"cross": HEALTHY})


def test_an_explosion_is_measured_from_the_lowest_loss() -> None:
    guard = Guard(explosion=3.0)
    for nll in (9.0, 4.0, 6.9, 5.0):
        guard.check(1, losses(nll), {})
    assert guard.lowest == 4.0
    with pytest.raises(Diverged, match=r"rose to 7.10 from 4.00"):
        guard.check(2, losses(7.1), {})
    Guard(None, lowest=1.0).check(3, losses(99.0), {})


def test_a_collapse_is_reported_once() -> None:
    guard = Guard(None)
    assert guard.warnings({"cross": HEALTHY, "decoder": COLLAPSED}) == []
    assert guard.warnings({}) == []
    [warning] = guard.warnings({"cross": COLLAPSED})
    assert "entropy 0.02, zeros 98%" in warning
    assert guard.warnings({"cross": COLLAPSED}) == []


def test_dead_rows_are_reported_once_beside_a_collapse() -> None:
    guard = Guard(None)
    few, many = HEALTHY._replace(dead_rows=0.2), HEALTHY._replace(dead_rows=0.4)
    assert guard.warnings({"cross": few, "encoder": few}) == []
    [warning] = guard.warnings({"cross": few, "encoder": many})
    assert "40% of the rows of encoder attention have no weight" in warning
    assert guard.warnings({"cross": many}) == []
    assert len(guard.warnings({"cross": COLLAPSED, "encoder": many})) == 1


@pytest.mark.parametrize("log_every", [1, 3])
def test_nothing_is_saved_after_a_bad_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_every: int
) -> None:
    original = trainer_state.TrainerState.update

    def poisoned(self: trainer_state.TrainerState, step: int, rate: float) -> torch.Tensor:
        if step == 5:
            next(p for p in self.parameters.values()).grad.fill_(math.nan)  # type: ignore[union-attr]
        return original(self, step, rate)

    recipe = tiny(steps=12, log_every=log_every, checkpoint_every=4, dev_every=None)
    with monkeypatch.context() as patch:
        patch.setattr(trainer_state.TrainerState, "update", poisoned)
        with pytest.raises(Diverged, match="diverged by step") as caught:
            train(recipe, tmp_path, quiet=True)
    assert 5 <= caught.value.step < 5 + log_every
    assert checkpoint.steps(tmp_path) == [4]
    tensors: dict[str, Any] = checkpoint.load(tmp_path, 4).tensors
    assert all(tensor.isfinite().all() for kind in tensors.values() for tensor in kind.values())
    # The run resumes from there without the fault.
    train(recipe, tmp_path, quiet=True)
    assert (tmp_path / "model").is_dir()


def test_a_dev_loss_that_is_not_finite_is_never_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "dev_loss", lambda *arguments: math.nan)
    with pytest.raises(Diverged, match="diverged by step 2: dev nll is nan"):
        train(tiny(dev_every=2, final="best", checkpoint_every=1), tmp_path, quiet=True)
    assert checkpoint.steps(tmp_path) == [1]
