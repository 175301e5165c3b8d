"""The feed-forward benchmark's product and its gate; its timing needs a GPU."""

import pytest
import torch

from benchmarks import feedforward as benchmark
from reluformer.bench.timing import Clock
from tests.ops.backends.triton.test_op import on_cpu

pytestmark = on_cpu
TILE = benchmark.Tile(16, 32, 8, 4, 1)


def test_the_product_has_either_epilogue() -> None:
    a, b, gate = torch.randn(48, 24), torch.randn(64, 24), torch.randn(48, 64)
    wanted = a @ b.t()
    torch.testing.assert_close(benchmark.product(a, b, None, TILE), wanted.relu())
    gated = torch.where(gate > 0, wanted, 0.0)
    torch.testing.assert_close(benchmark.product(a, b, gate, TILE), gated)


def test_implementations_that_agree_with_float64_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = benchmark.Case(benchmark.TOY, 16, 32)
    memory, broken = case.runs["memory"], "Triton 32x16, both"
    case.runs = {**case.runs, "wrong": lambda: 1.01 * memory()}
    assert all(case.check(name) is None for name in case.runs if name != "wrong")
    monkeypatch.setattr(benchmark, "product", None)
    rows = {row["way"]: row for row in benchmark.measure(case, Clock("cpu"))}
    assert rows["memory"]["both"] > 0 and rows["definition"]["both"] > 0
    assert rows[benchmark.MATMULS]["forward"] > 0
    assert rows["wrong"]["refused"] == "error 1.0e-02"
    assert "TypeError" in rows[broken]["refused"]
