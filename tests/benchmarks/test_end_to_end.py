"""The benchmark of training steps: models without padding, comparisons, time limit."""

import json
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import end_to_end as benchmark
from benchmarks import end_to_end_model as models
from benchmarks.end_to_end import TOY
from benchmarks.end_to_end_model import CUDNN, FLASH, OURS, REFERENCE, SDPA, Case, Contestant
from reluformer.bench.timing import Clock
from reluformer.processes import Processes

CPU = Processes(0, 1, torch.device("cpu"))
CASE = Case("document", 16)


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference in place of Triton's interpreter, which takes seconds."""
    monkeypatch.setitem(models.SETTINGS, OURS, models.SETTINGS[REFERENCE])


def losses(run: str, start: dict[str, Tensor] | None = None, count: int = 3) -> list[float]:
    plan = TOY._replace(settings=(*TOY.settings, "model.dropout=0.0"))
    return [float(loss) for loss in Contestant(CASE, run, plan, CPU, start).steps(count)]


def test_models_start_alike_and_learn() -> None:
    reference = losses(REFERENCE)
    assert len(set(reference)) == 3
    assert losses(REFERENCE) == reference
    assert losses(SDPA) != pytest.approx(reference, rel=1e-3)


def test_no_model_receives_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    contestant = Contestant(CASE, SDPA, TOY, CPU)
    seen = []
    forward = contestant.model.forward
    monkeypatch.setattr(
        contestant.model, "forward", lambda **names: seen.append(names) or forward(**names)
    )
    contestant.steps(1)
    assert seen[0]["source_lengths"] is seen[0]["target_lengths"] is None
    assert all(bool((batch.source_lengths == 16).all()) for batch in contestant.data)


def test_the_vocabulary_is_the_recipe_s() -> None:
    assert Case("sentence", 512).vocabulary(benchmark.GPU) == 10_000
    assert Case("document", 512).vocabulary(benchmark.GPU) == 30_000
    assert CASE.vocabulary(TOY) == TOY.vocabulary
    assert all(int(batch.source.max()) < TOY.vocabulary for batch in models.batches(CASE, TOY))


@pytest.mark.parametrize("run", [OURS, SDPA])
@pytest.mark.usefixtures("without_kernels")
def test_attention_calls_are_those_of_a_step(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    contestant = Contestant(CASE, run, TOY, CPU)
    calls: list[tuple[Any, ...]] = []
    attend = models.attend

    def record(*arguments: Any) -> Any:
        calls.append(arguments)
        return attend(*arguments)

    monkeypatch.setattr("reluformer.model.attention.attend", record)
    contestant.steps(1)
    inside, calls = calls, []
    monkeypatch.setattr(models, "attend", record)
    alone = contestant.attention_calls()
    assert {kind: count for kind, (count, _) in alone.items()} == {"full": 2, "causal": 1}
    for _, function in alone.values():
        function()
    # Encoder, decoder, cross-attention.
    for step, single in zip([inside[0], inside[1]], calls, strict=True):
        row, call, options, impl = step
        assert (row, impl) == (single[0], single[3]) and options.keys() == single[2].keys()
        assert call.q.shape == single[1].q.shape and call.q.stride() == single[1].q.stride()
        assert call.v.stride() == single[1].v.stride()
        assert call.visibility.causal == single[1].visibility.causal
        assert call.return_sums == single[1].return_sums


def test_cases_come_in_order_of_importance() -> None:
    found = list(benchmark.cases(["document", "sentence"], [512, 4096], True))
    assert found[:4] == [
        Case("document", 512),
        Case("document", 4096),
        Case("document", 4096, True),
        Case("document", 512, True),
    ]
    assert len(found) == len(set(found)) == 8
    assert len(list(benchmark.cases(["document"], [512, 4096], False))) == 2


def test_the_warm_up_compiles_once_for_each_need(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[str] = []

    def run(command: list[str], **options: Any) -> None:
        codes.append(command[-1].split("warm(*")[1][:-1])
        if len(codes) == 1:
            raise CalledProcessError(1, command, stderr="Traceback\nOutOfMemoryError: too large\n")

    monkeypatch.setattr(benchmark.subprocess, "run", run)
    monkeypatch.setattr(benchmark, "WARM_UP_PROCESSES", 1)
    benchmark.warm_up(["document"], (512, 1024, 4096), True)
    jobs = [eval(code) for code in codes]
    ours = {(length, compiled) for _, length, compiled, run in jobs if run == OURS}
    assert ours == {(512, True), (1024, True), (4096, False)} and len(jobs) == 5
    assert capsys.readouterr().out.endswith("OutOfMemoryError: too large\n")
    codes.clear()
    benchmark.warm_up(["document"], (512, 1024, 4096), False)
    assert len(codes) == 3 and not any("softmax" in code for code in codes)


def test_compiled_steps_meet_the_fastest_opponent() -> None:
    rows = [{**benchmark.head_of(CASE), "run": OURS, "opponent": FLASH}]
    compiled = CASE._replace(is_compiled=True)
    assert benchmark.opponents_of(CASE, rows, benchmark.GPU) == [CUDNN, FLASH]
    assert benchmark.opponents_of(compiled, rows, benchmark.GPU) == [FLASH]
    assert benchmark.opponents_of(compiled, [], benchmark.GPU) == [CUDNN, FLASH]


def test_ceilings_follow_from_the_times_of_the_attention() -> None:
    ours = {"ms": 90.0, "attention_ms": 30.0, "peak_gib": 9.0}
    best = {"run": CUDNN, "ms": 100.0, "attention_ms": 50.0, "peak_gib": 10.0}
    row = benchmark.compare(ours, best, 1.1)
    assert row["opponent"] == CUDNN and row["x_opponent"] == 1.1
    assert row["x_memory"] == 0.9 and row["x_attention"] == pytest.approx(5 / 3)
    assert row["ceiling_no_attention"] == 2.0 and row["ceiling_as_alone"] == 1.25


@pytest.mark.usefixtures("without_kernels")
def test_a_run_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = benchmark.measure(CASE, [OURS, CUDNN, SDPA], TOY, CPU)
    by_run = {row["run"]: row for row in rows}
    assert "No viable backend" in by_run[CUDNN]["failed"]
    assert by_run[OURS]["opponent"] == SDPA and by_run[OURS]["share"] > 0
    assert "No viable backend" in benchmark.table(rows)

    monkeypatch.setattr(Clock, "rounds", lambda *arguments: {})
    (row,) = benchmark.attempt(CASE, [SDPA], TOY, CPU)
    assert row["failed"].startswith("KeyError")


@pytest.mark.usefixtures("without_kernels")
def test_the_reference_agrees_with_itself() -> None:
    row = benchmark.agreement("document", TOY, CPU)
    assert row["apart"] == row["rounding"] == 0.0


def test_the_report_is_written_after_every_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.json"
    written: list[int] = []

    def measure(case: Case, *rest: Any) -> list[dict[str, Any]]:
        written.append(len(json.loads(out.read_text())["rows"]) if out.exists() else 0)
        return [{**benchmark.head_of(case), "run": OURS, "failed": "a reason"}]

    monkeypatch.setattr(benchmark, "measure", measure)
    monkeypatch.setattr(
        benchmark, "agreement", lambda recipe, *rest: {"recipe": recipe, "apart": 0, "rounding": 0}
    )
    arguments = ["end_to_end", "--quick", "--lengths", "8", "16", "--out", str(out)]
    monkeypatch.setattr("sys.argv", arguments)
    benchmark.main()
    assert written == [0, 1, 2, 3] and "a reason" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", [*arguments, "--seconds", "-1"])
    benchmark.main()
    report = json.loads(out.read_text())
    assert len(report["left_out"]) == 4 and not report["rows"]
    assert "no time for 4 cases" in capsys.readouterr().out
