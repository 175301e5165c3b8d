"""A study runs end to end on the tiny budget, resumes, and is reported."""

import io
import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from reluformer.cli import studies as command
from reluformer.config.recipe import load_recipe
from reluformer.data.prepare import Prepared
from reluformer.errors import UserError
from reluformer.info import info
from reluformer.locks import lock_file
from reluformer.report.gather import gather
from reluformer.report.html import html_report
from reluformer.report.markdown import markdown_report
from reluformer.study import coverage
from reluformer.study.budgets import BUDGETS, lookup_budget
from reluformer.study.cells import Cell, Outcome, load_outcome
from reluformer.study.corpora import (
    check_corpora,
    find_corpora,
    generate_corpora,
    vocabulary_size,
)
from reluformer.study.definition import Plan, Results
from reluformer.study.estimate import estimate
from reluformer.study.record import StudyRecord
from reluformer.study.registry import STUDIES, lookup_studies, lookup_study, study_from_file
from reluformer.study.runner import RunOptions, run_studies
from reluformer.study.selection import lost_models, select, set_aside
from reluformer.study.stored import load_outcomes
from reluformer.study.variants import sentence_cell

ROOT = Path(__file__).parents[2]
SMALL = ("train.steps=4", "train.dev_every=4", "train.checkpoint_every=2", "train.log_every=2")
TINY = BUDGETS["tiny"]


def two_cells(plan: Plan) -> list[Cell]:
    """The attentions softmax and default of the study `attention`."""
    cells = STUDIES["attention"].plan(plan)
    return [cell for cell in cells if cell.labels["attention"] in ("softmax", "default")]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, StudyRecord, list[str]]:
    out, lines = tmp_path_factory.mktemp("study"), []
    study = replace(STUDIES["attention"], plan=two_cells)
    options = RunOptions(out, TINY, jobs=2, assignments=SMALL, report=lines.append)
    return out, run_studies([study], options)[0], lines


def test_cells_are_trained_translated_and_compared(
    finished: tuple[Path, StudyRecord, list[str]],
) -> None:
    out, record, lines = finished
    assert "0 of 2 cells have ended; 2 cells to run" in lines[1] and "GB" in lines[1]
    assert [o.status for o in record.outcomes] == ["finished", "finished"], lines
    for outcome in record.outcomes:
        assert outcome.detail["scores"]["test"]["BLEU"]["signature"].startswith("nrefs:1")
        assert outcome.detail["tuned"]["length_penalty"] in TINY.decoding.penalties
        assert outcome.value("memory_ratio") > 0 and outcome.device_seconds > 0
        assert load_outcome(out / "tiny" / outcome.name) == outcome
    (comparison,) = record.comparisons
    assert comparison.system == {"attention": "default"}
    assert comparison.interval[0] <= comparison.interval[1]


def test_ended_cells_are_never_run_again(finished: tuple[Path, StudyRecord, list[str]]) -> None:
    out, first, _ = finished
    folder = out / "tiny" / first.outcomes[0].name
    written = (folder / "cell.json").stat().st_mtime_ns
    lines: list[str] = []
    study = replace(STUDIES["attention"], plan=two_cells)
    again = run_studies([study], RunOptions(out, TINY, assignments=SMALL, report=lines.append))[0]
    assert again.outcomes == first.outcomes and len(lines) == 2
    assert (folder / "cell.json").stat().st_mtime_ns == written


def test_a_call_that_runs_nothing_keeps_the_origin_of_the_numbers(tmp_path: Path) -> None:
    path = tmp_path / "tiny" / "theory.study.json"
    options = RunOptions(tmp_path, TINY, report=lambda _: None, minutes=0.0)

    def run() -> StudyRecord:
        (record,) = run_studies([STUDIES["theory"]], options)
        assert record == StudyRecord.load(path)
        return record

    earlier = replace(run(), command="reluformer study all", date="2026-01-01")
    earlier.save(path)
    assert run() == earlier
    (cell,) = STUDIES["theory"].plan(Plan(TINY))
    detail = {"budget": "tiny", "recipe": "", "corpus": None, "settings": {}}
    Outcome(cell.name, cell.labels, "finished", {}, detail).save(tmp_path / "tiny" / cell.name)
    assert run().date != "2026-01-01"


def test_the_report_has_verdicts_tables_signatures_and_maps(
    finished: tuple[Path, StudyRecord, list[str]],
) -> None:
    out, record, _ = finished
    contents = gather([out])
    page = html_report(contents)
    for text in ("Our default ReLU attention", "nrefs:1", "<svg", 'class="amap"', "device minutes"):
        assert text in page
    assert "http://" not in page.replace("http://www.w3.org", "") and "https://" not in page
    for outcome in record.outcomes:
        assert outcome.name in page
    text = markdown_report(contents)
    assert "| attention (tiny) | Our default ReLU attention reaches softmax |" in text


def test_a_diverged_cell_is_a_result_and_its_children_are_not_run(tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text(
        "recipe: toy-reverse\n"
        "common: {model.width: 16, model.heads: 2, train.steps: 4, train.log_every: 1,\n"
        "  train.bleu_every: null, train.dev_every: 4, data.generated.train: 50}\n"
        "runs:\n"
        "  wild: {train.lr: 1.0e+30, train.warmup: 0, train.clip: 1.0e+30}\n"
        "  child: {train.start_from: runs/x/wild}\n",
        encoding="utf-8",
    )
    study = study_from_file(tmp_path / "study.yaml")
    lines: list[str] = []
    record = run_studies([study], RunOptions(tmp_path / "out", TINY, report=lines.append))[0]
    wild, child = record.outcomes
    assert wild.status == "diverged" and "diverged" in wild.reason, lines
    assert child.reason == "its start study.wild diverged" and not record.failed
    assert study.conclude(Results(record.outcomes)).tables[0].rows[0][1] == "1, 1 diverged"


CHAIN = [
    Cell("start", {}),
    Cell("middle", {}, parent="start"),
    Cell("probe", {}, parent="middle"),
    Cell("other", {}),
]


def test_selected_cells_come_with_those_they_start_from() -> None:
    assert select(CHAIN, ()) == CHAIN
    assert [cell.name for cell in select(CHAIN, ["pr*"])] == ["start", "middle", "probe"]
    names = [cell.name for cell in select(CHAIN, ["other", "*d*", "start"])]
    assert names == ["other", "start", "middle"]
    with pytest.raises(UserError, match="only must match a cell, such as start, got 'x'"):
        select(CHAIN, ["other", "x"])


@pytest.mark.parametrize(
    ("kept", "again"), [((), ["middle", "start"]), (("start",), ["middle"]), (("middle",), [])]
)
def test_models_without_weights_are_trained_again_if_a_cell_starts_from_them(
    tmp_path: Path, kept: tuple[str, ...], again: list[str]
) -> None:
    lines: list[str] = []
    options = RunOptions(tmp_path, TINY)
    outcomes = {name: Outcome(name, {}, "finished", {}) for name in ("start", "middle", "other")}
    for name, outcome in outcomes.items():
        (options.root / name / "model").mkdir(parents=True)
        outcome.save(options.root / name)
        if name in kept:
            (options.root / name / "model" / "config.json").touch()
    left = dict(outcomes)
    assert sorted(lost_models(CHAIN, outcomes, options.root)) == again
    set_aside(CHAIN, left, options.root, lines.append)
    assert sorted(outcomes.keys() - left.keys()) == again
    assert sorted(line.split(":")[0] for line in lines) == again
    for name in again:
        assert load_outcome(options.root / "earlier" / name) == outcomes[name]
        assert not (options.root / name).exists()
    assert {o.name for o in load_outcomes(options.root)} == left.keys()


def test_models_to_train_again_are_announced(tmp_path: Path) -> None:
    study = replace(STUDIES["lengths"], plan=lambda plan: STUDIES["lengths"].plan(plan)[:4:3])
    (start, child) = study.plan(Plan(TINY))
    assert child.parent == start.name
    detail = {"budget": "tiny", "recipe": start.recipe, "settings": start.settings}
    detail |= {"corpus": start.corpus}
    folder = tmp_path / "tiny" / start.name
    Outcome(start.name, start.labels, "finished", {}, detail).save(folder)
    lines: list[str] = []
    run_studies([study], RunOptions(tmp_path, TINY, minutes=0.0, report=lines.append))
    assert "0 of 2 cells have ended; 2 cells to run" in lines[1]
    assert lines[2].endswith(f"because later cells need their weights: {start.name}")
    # Nothing has moved yet.
    assert load_outcome(folder) is not None


def test_studies_share_one_queue(tmp_path: Path) -> None:
    lines: list[str] = []
    options = RunOptions(tmp_path, TINY, minutes=0.0, report=lines.append)
    records = run_studies(lookup_studies(["ffn", "temperature", "ffn"]), options)
    assert [record.study for record in records] == ["ffn", "temperature"]
    names = {name for record in records for name in record.planned}
    # The softmax memory is a cell of both.
    assert len(names) < sum(len(record.planned) for record in records)
    assert f"0 of {len(names)} cells have ended" in lines[2]
    assert lookup_studies(["theory", "all"]) == list(STUDIES.values())


@pytest.mark.parametrize("fails", [False, True])
def test_failed_cells_set_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    program = [sys.executable, "-c", f"raise SystemExit({int(fails)})"]
    monkeypatch.setattr("reluformer.study.runner._command", lambda run, cell: program)
    with pytest.raises(typer.Exit) if fails else nullcontext():
        command.study(["theory", "ffn"], budget="tiny", only=["theory.s1"], out=tmp_path)
    failed = [
        StudyRecord.load(tmp_path / "tiny" / f"{name}.study.json").failed
        for name in ("theory", "ffn")
    ]
    assert failed == [{"theory.s1": "exit status 1: empty log"} if fails else {}, {}]


def test_zero_minutes_print_only_the_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command.study(["theory"], budget="tiny", minutes=0.0, out=tmp_path)
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_studies_are_listed_one_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Without a terminal each study is one line.
    monkeypatch.delenv("COLUMNS", raising=False)
    command.study(list_=True)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(STUDIES)


def test_every_study_concludes_without_outcomes() -> None:
    for study in STUDIES.values():
        findings = study.conclude(Results([]))
        assert findings.verdicts and findings.tables
        assert {v.state for v in findings.verdicts} <= {"not measured"}, study.name


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="study must be one of theory, ffn"):
        lookup_study("fnf")
    with pytest.raises(UserError, match="budget must be one of tiny, short, full"):
        lookup_budget("huge")
    for seeds in ((1, 1), (), (-1,), (2**63,)):
        with pytest.raises(UserError, match="seeds must be different numbers from 0 to"):
            BUDGETS["full"].with_seeds(seeds)

    with pytest.raises(UserError, match="must not have the name of the study theory"):
        study_from_file(tmp_path / "theory.yaml")


def test_corpora_are_checked_before_anything_is_trained(tmp_path: Path) -> None:
    names = ["europarl-sent"]
    folders = find_corpora(names, [str(tmp_path)])
    with pytest.raises(UserError, match="prepare it with `reluformer prepare data/europarl-sent"):
        check_corpora(folders)
    (tmp_path / "europarl-sent").mkdir()
    with pytest.raises(UserError, match=r"manifest.json is missing"):
        check_corpora(folders)
    generate_corpora({"europarl-sent": tmp_path / "tiny" / "europarl-sent"})
    part = [f"europarl-doc={tmp_path / 'tiny' / 'europarl-sent'}"]
    with pytest.raises(UserError, match="europarl-doc at .* has no split 'test.long'"):
        check_corpora(find_corpora(["europarl-doc"], part))
    with pytest.raises(UserError, match="data must name europarl-sent or europarl-doc, got 'x'"):
        find_corpora(names, ["x=data"])


def test_settings_that_cannot_work_leave_no_files(tmp_path: Path) -> None:
    options = RunOptions(tmp_path / "out", TINY, assignments=["train.stepz=3"])
    with pytest.raises(UserError, match="train.stepz is not a known field"):
        run_studies([STUDIES["ffn"]], options)
    file = tmp_path / "mine.yaml"
    file.write_text("recipe: tiny\nruns: {a: {data.source: none, data.generated: null}}\n")
    with pytest.raises(UserError, match="none does not exist"):
        run_studies([study_from_file(file)], replace(options, assignments=()))
    assert not (tmp_path / "out").exists()


def test_progress_reaches_a_file_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    content = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(content))
    RunOptions(Path("out"), TINY).report("a line")
    assert content.getvalue() == b"a line\n"


def test_two_calls_do_not_work_in_one_folder(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    options = RunOptions(tmp_path, TINY, minutes=0.0, report=lambda _: None)
    with (
        lock_file(tmp_path / "tiny" / ".lock", "held"),
        pytest.raises(UserError, match="tiny is in use by another study"),
    ):
        run_studies([STUDIES["theory"]], options)
    run_studies([STUDIES["theory"]], options)


def test_needs_follow_the_time_of_cells_alike_on_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cell = sentence_cell(TINY)
    recipe = load_recipe(cell.recipe, [f"{n}={json.dumps(v)}" for n, v in cell.settings.items()])

    def minutes(devices: list[str], jobs: int = 1, **labels: Any) -> float:
        detail = {"machine": {"devices": devices}}
        measured = Outcome(
            "other", cell.labels | labels, "finished", {"tokens": 52_224}, detail,
            seconds=48_000, device_seconds=12_000,
        )  # fmt: skip
        return estimate([(cell, recipe)], [measured], jobs, lambda _: 600).minutes

    # 60 steps of 1024 tokens, of which 15 % are padding.
    here = info()["devices"]
    guess = estimate([(cell, recipe)], [], 1, lambda _: 600).minutes
    assert minutes(["a faster GPU"]) == minutes(here, attention="default") == guess < 10
    assert minutes(here, seed=2, rate=1.0) == pytest.approx(800)
    # The time on a GPU is already divided among the cells that shared it.
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("reluformer.study.estimate.machine", lambda: {"devices": here})
    assert minutes(here, jobs=6) == pytest.approx(200)


def test_vocabularies_are_known_before_corpora_are_prepared(tmp_path: Path) -> None:
    def size(source: str, *, is_generated: bool = False) -> int:
        loaded = load_recipe("sentence", [f"data.source={source}"])
        return vocabulary_size(loaded, is_generated=is_generated)

    missing = str(tmp_path / "europarl-doc")
    assert size(missing) == 30_000 and size(missing, is_generated=True) == 600
    generate_corpora({"europarl-sent": tmp_path / "europarl-sent"})
    prepared = Prepared.open(tmp_path / "europarl-sent")
    assert size(str(prepared.folder)) == prepared.tokenizer().vocab_size
    assert vocabulary_size(load_recipe("tiny"), is_generated=True) == 1000


def test_coverage_counts_seeds() -> None:
    def result(memory: str, seed: int) -> Outcome:
        labels: dict[str, Any] = {"memory": memory, "values": "alike", "seed": seed}
        return Outcome(f"{memory}{seed}", labels, "finished", {})

    found = coverage.cover(STUDIES["ffn"], [result("relu", seed) for seed in (1, 2, 2)])
    assert (found.required, found.present) == (10, 2)
    assert found.missing[0] == "memory relu, values alike: 2 of 3 seeds"


@pytest.mark.parametrize("path", sorted((ROOT / "studies").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_setting_of_a_study_file_exists(path: Path) -> None:
    study = study_from_file(path)
    for cell in study.plan(Plan(TINY)):
        assigned = [f"{name}={json.dumps(value)}" for name, value in cell.settings.items()]
        load_recipe(cell.recipe, assigned)


def test_cells_that_the_clock_cuts_are_left_for_the_next_call(tmp_path: Path) -> None:
    lines: list[str] = []
    options = RunOptions(tmp_path, TINY, minutes=0.0, report=lines.append)
    record = run_studies([STUDIES["theory"]], options)[0]
    assert record.planned == ["theory.s1"] and not record.outcomes and not record.failed
    assert "1 cells to run" in lines[1]
    (saved,) = gather([tmp_path]).studies
    assert saved.findings.verdicts[0].state == "not measured"
