"""Learning rates, regulariser weights and seeds as functions of the step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reluformer.train.schedules import learning_rate, regulariser_share, step_seed
from tests.train.tiny import tiny


def test_inverse_square_root() -> None:
    config = tiny(lr=0.4, warmup=4, steps=100).train
    rates = [learning_rate(config, step) for step in (1, 2, 4, 16, 64)]
    assert rates == pytest.approx([0.1, 0.2, 0.4, 0.2, 0.1])


def test_cosine_falls_to_almost_nothing() -> None:
    config = tiny(lr=0.4, warmup=10, steps=109, schedule="cosine").train
    rates = [learning_rate(config, step) for step in (5, 10, 60, 109)]
    assert rates == pytest.approx([0.2, 0.4, 0.2, 0.0], abs=2e-4)
    assert rates[-1] > 0


@given(st.integers(0, 50), st.integers(1, 200), st.sampled_from(["inverse_sqrt", "cosine"]))
def test_rates_rise_then_fall_and_stay_positive(warmup: int, steps: int, schedule: str) -> None:
    config = tiny(lr=1.0, warmup=warmup, steps=steps, schedule=schedule).train
    rates = [learning_rate(config, step) for step in range(1, steps + 1)]
    top = min(max(warmup, 1), steps) - 1
    assert all(0 < rate <= 1 for rate in rates)
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)


def test_regularisers_warm_up() -> None:
    shares = [regulariser_share(tiny(regulariser_warmup=4).train, step) for step in (1, 2, 4, 9)]
    assert shares == [0.25, 0.5, 1.0, 1.0]
    assert regulariser_share(tiny().train, 1) == 1.0


def test_seeds_differ_by_seed_step_and_process() -> None:
    seeds = {step_seed(s, step, rank) for s in range(4) for step in range(30) for rank in range(4)}
    assert len(seeds) == 4 * 30 * 4
    # A change of this value would change all runs.
    assert step_seed(1, 2, 3) == 35060472368136965
