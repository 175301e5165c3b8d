"""The benchmark on a GPU, with the implementations that must run there. `pytest -m gpu`."""

import pytest
import torch

from reluformer.bench.cases import Case, Plan
from reluformer.bench.contestants import contestants
from reluformer.bench.gate import check, check_all
from reluformer.bench.measure import Selection, measure, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_quick_run() -> None:
    report = run(Selection(device="cuda", quick=True), seconds=120)
    assert not report.skipped
    timed = {(row.mode, row.name) for row in report.rows}
    for mode in ("forward", "backward", "both", "decode"):
        assert {(mode, "relu triton"), (mode, "SDPA-flash")} <= timed
    assert {("both", "packed"), ("both", "row sums and entropy"), ("forward", "dropout")} <= timed
    ours = next(row for row in report.rows if row.name == "relu triton" and row.mode == "both")
    assert ours.host_us and ours.peak_mib and ours.x_softmax


@pytest.mark.slow
def test_flex_attention_is_timed_in_every_pass() -> None:
    case = Case("dense", "cuda", "bfloat16", 1, 2, 2, 4096, 4096, 64, causal=True)
    plan = Plan((case,), matmul=1024, rounds=3, row_seconds=0.0, workers=0)
    report = measure(plan, seconds=300)
    for name in ("FlexAttention", "FlexAttention, log of ReLU"):
        found = [row.mode for row in report.rows if row.name == name]
        assert found == ["forward", "backward", "both"], (report.checks, report.skipped)


@pytest.mark.slow
def test_a_worker_process_returns_the_same_check() -> None:
    case = Case("dense", "cuda", "bfloat16", 1, 2, 2, 300, 300, 64, causal=True)
    there = {each.name: each for each in check_all([case], workers=2)}
    assert there["relu triton"] == check(case, contestants(case)["relu triton"])
    assert there["relu triton"].passed
