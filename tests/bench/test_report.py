"""Reports: JSON round trip, table and figure."""

import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from reluformer.bench.plot import panels_of, plot
from reluformer.bench.report import Report, table
from reluformer.bench.rules import DEFAULT, OTHERS
from reluformer.errors import UserError
from reluformer.files import write_json
from tests.bench.synthetic import DECODE, report


def test_a_report_survives_the_json_round_trip(tmp_path: Path) -> None:
    found = report()
    path = tmp_path / "report.json"
    write_json(path, found.to_dict())
    again = Report.load(path)
    assert again == found
    assert again.checks[-2].errors == {"hard out": 0.24, "hard dq": math.inf}
    json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert table(again) == table(found)
    told = json.loads(path.read_text(encoding="utf-8"))
    assert set(told) >= {"command", "date", "commit", "environment", "rows", "checks", "cases"}
    assert told["environment"]["packages"]["torch"] and told["environment"]["devices"]


@pytest.mark.parametrize("text", ["{}", "[]", "nonsense", '{"rows": [{"x": 1}]}'])
def test_other_files_are_refused_in_one_sentence(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"other.json is not a report of `reluformer bench`"):
        Report.load(path)


def test_the_table_has_numbers_refusals_and_reasons() -> None:
    text = table(report())
    lines = text.splitlines()
    ours = next(line for line in lines if line.startswith("| relu triton"))
    # Medians 1.5 and 2.5 ms; ratios 2 / 1 and 3 / 2.
    assert "91.6, 1.75x" in ours and "64.0" in ours and "2.0e-03" in ours
    refused = next(line for line in lines if "log of ReLU" in line)
    assert "refused: error of hard" in refused and "x," not in refused
    assert "- FlexAttention: no compiler (1 of 5 cases)" in lines
    assert "- a case: time was up" in lines
    decode = lines[lines.index(next(line for line in lines if line.startswith(DECODE.name))) + 4]
    assert "1500.0, 1.75x, 22.4" in decode


def test_a_refused_kernel_has_no_row() -> None:
    found = report()
    name = "FlexAttention, log of ReLU"
    assert not [row for row in found.rows if row.name == name]


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_the_figure_is_reproducible_and_names_its_lines(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = report()
    assert [len(cases) for cases in panels_of(found).values()] == [2, 1]
    paths = [tmp_path / f"{name}{suffix}" for name in "ab"]
    for path in paths:
        plot(found, path)
    first, second = (path.read_bytes() for path in paths)
    assert first == second
    if suffix == ".svg":
        text = first.decode()
        for part in ("relu triton", "SDPA-cuDNN", "matmul", "d 64, causal", "log of ReLU"):
            assert part in text
    else:
        assert first.startswith(b"\x89PNG") and len(first) > 10_000


def test_the_figure_shows_one_row_normalised_power(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = report()
    ours = [row for row in found.rows if row.name == "relu triton"]
    for name in (DEFAULT, *OTHERS):
        found.rows += [replace(row, name=name) for row in ours]
    plot(found, tmp_path / "x.svg")
    text = (tmp_path / "x.svg").read_text(encoding="utf-8")
    assert DEFAULT in text and not any(name in text for name in OTHERS)


def test_a_figure_that_cannot_be_drawn_is_refused_without_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"plot must end in .svg, .png, .pdf, got .*x.gif"):
        plot(report(), tmp_path / "x.gif")
    empty = report()
    empty.rows.clear()
    with pytest.raises(UserError, match="no timed dense case"):
        plot(empty, tmp_path / "x.svg")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs the package matplotlib.*reluformer\[plots\]"):
        plot(report(), tmp_path / "x.svg")
    assert not list(tmp_path.iterdir())
