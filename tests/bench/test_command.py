"""`reluformer bench` from end to end, on tiny cases."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner, Result

from reluformer.bench import measure as measuring
from reluformer.bench.cases import MODES, Case, plan
from reluformer.bench.contestant import Contestant
from reluformer.bench.contestants import contestants
from reluformer.bench.measure import measure
from reluformer.bench.report import table
from reluformer.cli import app
from reluformer.ops import relu_attention
from reluformer.products import onednn_is_exact

ONLY = ("bench", "--quick", "--device", "cpu")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_call_runs_in_the_context_of_its_contestant() -> None:
    case = next(case for case in plan("cpu", quick=True).cases if case.group == "dense")
    onednn = contestants(case)["SDPA-oneDNN"]
    call = measuring._within(onednn.context, torch.get_float32_matmul_precision)
    assert call() == ("medium" if onednn_is_exact() else "highest")
    assert torch.get_float32_matmul_precision() == "highest"


def test_onednn_is_not_timed_where_it_would_round(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in plan("cpu", quick=True).cases if case.group == "dense")
    monkeypatch.setattr("reluformer.bench.contestants.onednn_is_exact", lambda: False)
    assert "would round" in (contestants(case)["SDPA-oneDNN"].absent or "")


def test_a_quick_run_writes_json_a_table_and_a_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "found.json", tmp_path / "found.svg"
    done = run(*ONLY, "--out", out, "--plot", picture)
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text(encoding="utf-8"))
    modes = {(row["mode"], row["name"]) for row in found["rows"]}
    for name in ("relu cpu", "relu reference", "softmax sdpa", "SDPA-flash", "entmax15 reference"):
        assert {(mode, name) for mode in ("forward", "backward", "both", "decode")} <= modes
    assert (("backward", "SDPA-oneDNN") in modes) == onednn_is_exact()
    assert ("both", "dropout") in modes and ("both", "matmul") in modes
    for row in found["rows"]:
        assert row["ms"] > 0 and row["pairs"] >= 3
        if row["name"] == "matmul":
            assert row["tflops"] * row["ms"] * 1e9 == pytest.approx(2 * 64**3)
        if row["mode"] == "both" and row["name"] != "matmul":
            assert row["peak_mib"] > 0
    assert found["command"].startswith("reluformer") and found["seconds"] > 0
    assert "| relu cpu" in done.stdout and "SDPA-cuDNN" in done.stdout
    assert "GFLOP/s" in done.stdout and "TFLOP/s" not in done.stdout
    assert "</svg>" in picture.read_text(encoding="utf-8")
    again = run("bench", "--from", out)
    assert again.stdout == done.stdout
    assert json.loads(run("bench", "--from", out, "--json").stdout) == found


def test_json_on_standard_output_of_chosen_cases() -> None:
    done = run(*ONLY, "--only", "decode", "--dtype", "bfloat16", "--json")
    found = json.loads(done.stdout)
    assert {row["mode"] for row in found["rows"]} == {"decode"}
    assert {case["dtype"] for case in found["cases"]} == {"bfloat16"}


def wrong(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return (1.01 * relu_attention(q, k, v, impl="reference"),)


def test_a_wrong_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def joined(case: Case) -> dict[str, Contestant]:
        found = contestants(case)
        kept = {name: found[name] for name in ("relu cpu", "SDPA-flash")}
        return {**kept, "wrong": Contestant("wrong", "relu", wrong, case)}

    monkeypatch.setattr("reluformer.bench.gate.contestants", joined)
    monkeypatch.setattr(measuring, "contestants", joined)
    done = run(*ONLY, "--only", "full, n 128")
    assert "refused: error of" in done.stdout and done.exit_code == 0
    found = json.loads(run(*ONLY, "--only", "full, n 128", "--json").stdout)
    assert {row["name"] for row in found["rows"]} == {"relu cpu", "SDPA-flash", "matmul"}


def test_every_pass_calls_the_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = plan("cpu", quick=True).selected(["full, n 128"])
    (case,) = chosen.cases
    sdpa, calls = contestants(case)["SDPA-flash"].run, Counter[bool]()

    def counted(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        calls[torch.is_grad_enabled()] += 1
        return sdpa(q, k, v)

    entrants = {"counted": Contestant("counted", "softmax", counted, case)}
    for place in ("gate", "measure"):
        monkeypatch.setattr(f"reluformer.bench.{place}.contestants", lambda case: entrants)
    report = measure(chosen, seconds=60)
    assert {row.mode for row in report.rows if row.name == "counted"} == set(MODES["dense"])
    # Forward passes run without gradients, the others with them.
    assert min(calls.values()) > chosen.rounds and len(calls) == 2


def test_inputs_that_take_turns_fill_twice_the_cache() -> None:
    case = plan("cpu", quick=True).cases[0]
    size = case.cache_bytes
    sets = [
        measuring._input_sets(case, cache) for cache in (0, size // 2, size, 3 * size, 99 * size)
    ]
    assert sets == [1, 1, 2, 6, 16]


def test_without_time_every_case_is_reported_as_skipped() -> None:
    report = measure(plan("cpu", quick=True), seconds=1e-9)
    assert not report.rows
    assert set(report.skipped.values()) == {"time was up"}
    assert len(report.skipped) == len(report.cases)


class Once(torch.autograd.Function):
    """Keeps its input; its backward cannot be repeated."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        ctx.spent = False
        return given.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if ctx.spent:
            raise RuntimeError("the graph is gone\nfor good")
        ctx.spent = True
        return grad


def test_a_failure_in_one_pass_leaves_the_others_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def joined(case: Case) -> dict[str, Contestant]:
        sdpa = contestants(case)["SDPA-flash"].run
        graphs = iter([None])

        def once(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            return (Once.apply(sdpa(q, k, v)[0]),)

        def no_graph(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            # Only the comparison with float64 gets a graph.
            if torch.is_grad_enabled() and next(graphs, 0) == 0:
                raise MemoryError("no room for a graph")
            return sdpa(q, k, v)

        runs = {"fine": sdpa, "once": once, "no graph": no_graph}
        return {name: Contestant(name, "softmax", each, case) for name, each in runs.items()}

    chosen = plan("cpu", quick=True).selected(["full, n 128"])
    entrants = joined(chosen.cases[0])
    for place in ("gate", "measure"):
        monkeypatch.setattr(f"reluformer.bench.{place}.contestants", lambda case: entrants)
    report = measure(chosen, seconds=60)
    timed = {mode: {r.name for r in report.rows if r.mode == mode} for mode in MODES["dense"]}
    assert timed == {
        "forward": {"fine", "once", "no graph", "matmul"},
        "backward": {"fine", "matmul"},
        "both": {"fine", "once", "matmul"},
    }
    reasons = {name.split("heads 8, ")[1]: reason for name, reason in report.skipped.items()}
    assert reasons == {
        "backward, once": "RuntimeError: the graph is gone",
        "backward, no graph": "MemoryError: no room for a graph",
        "both, no graph": "MemoryError: no room for a graph",
    }
    assert "backward, once: RuntimeError: the graph is gone" in table(report).split("Not timed")[1]


def test_a_failing_summary_skips_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    summarise = measuring.summarise

    def fail(case: Case, mode: str, *arguments: object, **options: object) -> object:
        if mode == "backward":
            raise MemoryError("too large\nby far")
        return summarise(case, mode, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(measuring, "summarise", fail)
    report = measure(plan("cpu", quick=True).selected(["full, n 128"]), seconds=60)
    assert {row.mode for row in report.rows} == {"forward", "both"}
    assert list(report.skipped.values()) == ["MemoryError: too large"]


MISTAKES = [
    (("--seconds", "0"), "seconds must be above 0, got 0"),
    (("--threads", "0"), "threads must be from 1 to 4096, got 0"),
    (("--threads", "999999999999"), "threads must be from 1 to 4096, got 999999999999"),
    (("--dtype", "int8"), "dtype must be one of"),
    (("--only", "nonsense"), "only must match a case"),
    (("--plot", "x.gif"), "plot must end in"),
    (("--out", "/dev/null/x.json"), "/dev/null/x.json cannot be used"),
    (("--from", "none.json"), "none.json cannot be read"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=lambda v: " ".join(v)[:30])
def test_a_mistake_is_one_line(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base = ("bench",) if "--from" in arguments else ONLY
    done = run(*base, *arguments)
    assert done.exit_code == 2
    assert message in done.stderr and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_report_and_a_measurement_exclude_each_other() -> None:
    done = run("bench", "--from", "x.json", "--quick")
    assert done.exit_code == 2 and "nothing is measured" in done.stderr
