"""Training steps on a CPU are timed for each way to compute their products."""

import pytest

from benchmarks.cpu_steps import measure
from reluformer.config.recipe import load_recipe

SMALL = ["model.width=16", "model.heads=2", "model.slots=16", "train.batch_tokens=128"]


def test_ratios_are_to_the_default_of_torch() -> None:
    rows = measure(load_recipe("small", SMALL), vocabulary=50, rounds=1)
    assert len(rows) == 3 and rows[0]["times_as_fast"] == 1
    assert all(r["ms"] * r["times_as_fast"] == pytest.approx(rows[0]["ms"]) for r in rows)
