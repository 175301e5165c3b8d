"""The end-to-end benchmark: equal losses for every split into parts; speeds are not tested."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import end_to_end as benchmark
from reluformer.config.recipe import load_recipe
from reluformer.model import ReLUFormer

SETTINGS = ["model.dropout=0.0", "train.warmup=2", "train.compile=false", *benchmark.TINY]


def losses(run: str, parts: int = 1, told: bool = True) -> list[float]:
    plan = benchmark.TOY
    recipe = load_recipe(benchmark.RECIPE, [*SETTINGS, *benchmark.RUNS[run]])
    torch.manual_seed(0)
    start = ReLUFormer(recipe.model_with(plan.vocabulary)).state_dict()
    data = benchmark.batches(plan, 16)
    found: list[float] = benchmark.attempt(parts, recipe, plan, data, start, told)["losses"]
    return found


def test_losses_do_not_depend_on_parts_and_lengths() -> None:
    whole = losses(benchmark.REFERENCE)
    assert len(whole) == benchmark.TOY.steps and len(set(whole)) == len(whole)
    assert losses(benchmark.REFERENCE, parts=2) == pytest.approx(whole, rel=1e-5)
    assert losses(benchmark.REFERENCE, told=False) == pytest.approx(whole, rel=1e-5)
    assert losses("softmax SDPA") != pytest.approx(whole, rel=1e-3)


def test_references_come_last_and_the_yardstick_at_short_lengths_only() -> None:
    runs = benchmark.order(benchmark.GPU.lengths)
    slow = [(length, name) for length, name in runs if "reference" in name]
    assert runs[-len(slow) :] == slow
    assert [length for length, name in slow if name == benchmark.YARDSTICK] == [512, 1024]
    others = len(benchmark.RUNS) - 1
    assert len(runs) == len(set(runs)) == others * len(benchmark.GPU.lengths) + 2


def test_the_report_is_written_after_every_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "found.json"
    monkeypatch.setattr("sys.argv", ["end_to_end", "--quick", "--out", str(out)])
    row = {"losses": [1.0], "tokens_per_second": 1.0}
    written: list[int] = []

    def attempt(*given: Any) -> dict[str, Any]:
        written.append(len(json.loads(out.read_text())["rows"]) if out.exists() else 0)
        return dict(row)

    monkeypatch.setattr(benchmark, "attempt", attempt)
    benchmark.main()
    assert written == list(range(len(benchmark.RUNS)))
    rows = json.loads(out.read_text())["rows"]
    assert all(each["x_reference"] == 1.0 for each in rows)


def test_what_does_not_fit_is_cut_and_what_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(parts: int, fits: int) -> dict[str, Any]:
        if fits == 0:
            raise RuntimeError("no such kernel\nwith details")
        if parts < fits:
            raise torch.OutOfMemoryError
        return {"parts": parts}

    monkeypatch.setattr(benchmark, "train", train)
    assert benchmark.attempt(1, 4) == {"parts": 4}
    assert benchmark.attempt(1, 8) == {"failed": "out of memory"}
    assert benchmark.attempt(1, 0) == {"failed": "RuntimeError: no such kernel"}


def test_rows_are_compared_with_the_reference() -> None:
    rows: list[dict[str, Any]] = [
        {"length": 8, "run": "relu triton", "losses": [3.0, 2.5], "tokens_per_second": 30.0},
        {"length": 8, "run": benchmark.REFERENCE, "losses": [3.0, 2.0], "tokens_per_second": 10.0},
        {"length": 8, "run": benchmark.YARDSTICK, "losses": [3.2, 2.0], "tokens_per_second": 5.0},
        {"length": 8, "run": "softmax SDPA", "failed": "no time left"},
    ]
    benchmark.compare(rows)
    assert rows[0]["apart"] == 0.5 and rows[0]["x_reference"] == 3.0
    assert rows[2]["rounding"] == pytest.approx(0.2)
    assert "no time left" in benchmark.table(rows)
