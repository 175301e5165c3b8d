"""Studies and runs that a report gathers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reluformer.errors import UserError
from reluformer.report.gather import Contents, gather
from reluformer.report.html import html_report
from reluformer.report.markdown import markdown_report
from reluformer.study.cells import Outcome
from reluformer.study.findings import Table
from reluformer.study.record import StudyRecord


def test_a_single_run_is_reported(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text("{}", encoding="utf-8")
    site = {"entropy": 1.0, "zeros": 0.5}
    points = [
        {"step": step, "nll": 3.0 / step, "tokens": 100 * step, "attention": {"cross": site}}
        for step in (1, 2)
    ]
    points[1]["dev"] = {"nll": 1.25}
    text = "".join(json.dumps(point) + "\n" for point in points)
    (run / "metrics.jsonl").write_text(text, encoding="utf-8")
    page = html_report(gather([run]))
    assert "nll&nbsp;1.250" in page and page.count("<svg") == 3


def record(folder: Path, **changes: Any) -> StudyRecord:
    """The record of a study from a file: one of two cells has ended."""
    table = Table("Runs", ["run", "BLEU"], [["a long name of a run", "20.00"]])
    values: dict[str, Any] = {
        "study": "mine", "budget": "tiny", "date": "", "command": "", "commit": None,
        "machine": {}, "folder": "out", "planned": ["mine.a", "mine.b"], "tables": [table],
        "outcomes": [Outcome("mine.a", {}, "finished", {})],
    }  # fmt: skip
    made = StudyRecord(**(values | changes))
    made.save(folder / f"{made.study}.study.json")
    return made


def test_studies_of_other_budgets_than_full_say_so(tmp_path: Path) -> None:
    for budget in ("full", "tiny"):
        (tmp_path / budget).mkdir()
        record(tmp_path / budget, study="theory", budget=budget, tables=[])
    contents = gather([tmp_path])
    text = markdown_report(contents)
    assert "| theory | Output" in text and "| theory (tiny) | Output" in text
    page = html_report(contents)
    assert '"theory-full">theory</h2>' in page and '"theory-tiny">theory (tiny)</h2>' in page


def test_a_study_from_a_file_has_its_tables_and_says_what_is_left(tmp_path: Path) -> None:
    made = record(tmp_path)
    contents = gather([tmp_path])
    assert contents.studies[0].findings.tables == made.tables
    for text in (html_report(contents), markdown_report(contents)):
        assert "1 of 2 cells has not run; verdicts and tables are of the others." in text
        assert "mine.b" in text and "not run" in text.replace("&nbsp;", " ").split("mine.b")[1]
        assert "Studies without results" not in text
        assert "20.00" in text and "they decide nothing about the claims" in text
    assert "\n| --- | ---: |\n| a long name of a run | 20.00 |\n" in text
    record(tmp_path, planned=["mine.a"])
    assert "not run" not in html_report(gather([tmp_path]))
    record(tmp_path, failed={"mine.b": "exit status 1"})
    assert "failed in the last call: mine.b: exit status 1" in markdown_report(gather([tmp_path]))


def test_remarks_stand_below_the_verdicts(tmp_path: Path) -> None:
    record(tmp_path)
    (tmp_path / "mine.notes.md").write_text("A <b> reason.\n\nAnother.\n", encoding="utf-8")
    contents = gather([tmp_path])
    assert "<p>A &lt;b&gt; reason.</p>\n<p>Another.</p>" in html_report(contents)
    assert "\nA <b> reason.\n\nAnother.\n" in markdown_report(contents)


def test_a_folder_that_is_named_twice_is_reported_once(tmp_path: Path) -> None:
    record(tmp_path)
    assert len(gather([tmp_path, tmp_path, tmp_path / "mine.study.json"]).studies) == 1


@pytest.mark.parametrize("report", [html_report, markdown_report])
def test_damage_that_shows_late_names_the_record(
    tmp_path: Path, report: Callable[[Contents], str]
) -> None:
    damaged = Outcome("mine.a", {}, "finished", {}, {"scores": {"test": None}})
    record(tmp_path, outcomes=[damaged])
    contents = gather([tmp_path])
    with pytest.raises(UserError, match="mine.study.json is damaged: AttributeError"):
        report(contents)


def test_nothing_to_report_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither records of studies"):
        gather([tmp_path])
    with pytest.raises(UserError, match="does not exist"):
        gather([tmp_path / "none"])
    (tmp_path / "x.study.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match="is no record of a study"):
        gather([tmp_path])


def test_studies_that_have_not_begun_are_named(tmp_path: Path) -> None:
    record(tmp_path, study="theory", planned=[], outcomes=[])
    missing = "Studies without results here: ffn, slots"
    for text in (html_report(gather([tmp_path])), markdown_report(gather([tmp_path]))):
        assert missing in text


def test_cells_without_a_time_are_not_counted_as_free(tmp_path: Path) -> None:
    cells = [Outcome(f"mine.{at}", {}, "finished", {}, device_seconds=90.0 * at) for at in range(3)]
    cells.append(Outcome("mine.child", {}, "diverged", {}, reason="its start mine.0 diverged"))
    record(tmp_path, outcomes=cells)
    contents = gather([tmp_path])
    words = "4.5 device minutes (cells without a recorded time: 1)"
    assert words in markdown_report(contents) and html_report(contents).count(words) == 2
