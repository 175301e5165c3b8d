"""Speeds relative to softmax are those of today's kernels, and drawn."""

import json
from pathlib import Path

import pytest

pytest.importorskip("triton")

from benchmarks import speed_curves
from benchmarks.speed_curves import Panel


def row(choice: str, speed: float, **changes: object) -> dict[str, object]:
    """A measured choice of the default attention at width 128, forward and backward."""
    head = {"rule": "power 4", "width": 128, "pass": "both", "causal": False, "length": 4096}
    return {**head, "choice": choice, "x_softmax": speed, **changes}


def test_a_point_is_that_of_the_kernels_in_use() -> None:
    rows = [
        {**row("cuDNN", 1.0), "x_softmax": 1.0},
        row("late, recomputed", 9.0),
        row("late, stored", 1.5, causal=True),
        row("late, stored", 1.1),
        row("late, stored", 9.0, length=16384),
        row("two, recomputed", 0.9, length=16384),
    ]
    assert speed_curves.speeds(rows, "power 4", Panel(128, "both")) == {4096: 1.1, 16384: 0.9}


def test_results_of_kernel_choices_are_drawn(tmp_path: Path) -> None:
    rules, passes = speed_curves.STYLES, ("forward", "both")
    rows = [
        row("two, recomputed", 1.2, **{"rule": rule, "pass": each, "width": width, "length": 512})
        for rule in rules
        for each in passes
        for width in (64, 128)
    ] + [row("late, recomputed", 1.3, **{"pass": "forward", "width": 64, "length": 512})]
    report = {"machine": {"devices": ["cpu", "cuda:0 (H200)"]}, "rows": rows}
    file, out = tmp_path / "choices.json", tmp_path / "speed.svg"
    file.write_text(json.dumps(report), encoding="utf-8")
    speed_curves.main([str(file), "--out", str(out)])
    first = out.read_bytes()
    assert b"cuda:0 (H200)" in first and "ReLU⁴ / row sum (default)".encode() in first
    speed_curves.main([str(file), "--out", str(out)])
    assert out.read_bytes() == first


def test_missing_curves_are_a_mistake_of_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "choices.json"
    file.write_text(json.dumps({"machine": {"devices": ["cuda:0"]}, "rows": []}), encoding="utf-8")
    with pytest.raises(SystemExit):
        speed_curves.main([str(file), "--out", str(tmp_path / "speed.svg")])
    assert "have no forward pass of plain at width 64" in capsys.readouterr().err
    assert not (tmp_path / "speed.svg").exists()
