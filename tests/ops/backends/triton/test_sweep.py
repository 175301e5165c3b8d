"""Candidates of the tile benchmark; timing them needs a GPU."""

import pytest

from benchmarks import tiles as sweep
from reluformer.ops.backends.triton import tuning
from reluformer.ops.backends.triton.launch import Launch


@pytest.mark.parametrize("case", sweep.CASES, ids=str)
def test_the_tile_of_the_table_is_a_candidate(case: sweep.Case) -> None:
    for kernel in sweep.KERNELS:
        tried = sweep.candidates(case, kernel)
        assert tried[0] in tuning.every(kernel, case.width, itemsize=2)
        assert len(set(tried)) == len(tried) >= 5


def test_the_default_models_call_is_quickly_compiled() -> None:
    # Lengths share what is compiled; 14 workers take about half a minute.
    jobs = sweep.jobs(sweep.MODELS)
    kinds = {(case.width, case.mask, kernel, tile) for case, kernel, tile in jobs}
    assert len(kinds) <= 230
    assert [case for case in sweep.CASES if "model" in str(case)] == sweep.MODELS


@pytest.mark.parametrize("kernel", sweep.KERNELS)
def test_each_tile_is_timed(kernel: tuning.Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = sweep.Case(64, "causal", 32, "model").problem(tokens=32, device="cpu")
    tiles, launched = (tuning.Tile(16, 16, 4, 1), tuning.Tile(32, 64, 4, 1)), []

    def record(launch: Launch, *tensors: object) -> None:
        launched.append((launch.options["CONFIG"].BLOCK_M, launch.options["CONFIG"].BLOCK_N))

    monkeypatch.setattr(Launch, "__call__", record)
    monkeypatch.setattr(sweep, "microseconds", lambda call: (call(), launched[-1])[1])
    found = sweep.times(problem, kernel, tiles)
    assert found == {tile: (tile.queries, tile.keys) for tile in tiles}


@pytest.mark.parametrize("mask", ["lengths", "causal"])
def test_the_default_models_call_runs(mask: str) -> None:
    problem = sweep.Case(64, mask, 16, "model").problem(tokens=16, device="cpu")
    # The interpreter cannot multiply bfloat16.
    q, k, v = (each.float() for each in problem[:3])
    problem = problem._replace(q=q, k=k, v=v)
    with tuning.override({kernel: tuning.Tile(16, 16, 4, 1) for kernel in sweep.KERNELS}):
        for kernel in sweep.KERNELS:
            made = sweep.work(problem, kernel)()
            if kernel == "forward":
                assert isinstance(made, tuple) and made[0].isfinite().all() and made[1].min() > 0
