"""What a report reads."""

import json
from pathlib import Path

import pytest

from reluformer.errors import UserError
from reluformer.report.gather import gather
from reluformer.report.html import html_report


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
    assert "nll 1.250" in page and page.count("<svg") == 3


def test_nothing_to_report_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither records of studies"):
        gather([tmp_path])
    with pytest.raises(UserError, match="does not exist"):
        gather([tmp_path / "none"])
    (tmp_path / "x.study.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match="is no record of a study"):
        gather([tmp_path])
