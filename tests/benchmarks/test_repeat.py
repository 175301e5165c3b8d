"""The benchmark of repeatability finds results that differ, are wrong, or are missing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import repeat
from benchmarks.repeat import TOY, Variant

SMALL = [Variant("default", 64, "causal"), Variant("relu", 64, "packed")]


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str) -> dict[str, Any]:
    monkeypatch.setattr(repeat, "variants", lambda: SMALL)
    monkeypatch.setattr("sys.argv", ["repeat", "--quick", "--out", str(out), *arguments])
    try:
        repeat.main()
    finally:
        report: dict[str, Any] = json.loads(out.read_text())
    return report


def test_all_rules_masks_and_widths_are_covered() -> None:
    names = repeat.variants()
    assert len(names) == len(set(names)) == 52
    assert {name.mask for name in names} == {*repeat.MASKS, "window"}
    assert {name.rule for name in names} == set(repeat.RULES)


@pytest.mark.parametrize("variant", repeat.variants()[::2], ids=str)
def test_every_variant_agrees_with_float64(variant: Variant) -> None:
    for row in repeat.check((variant, TOY)):
        assert repeat.is_within(row), row
        assert max(row["errors"].values()) < 1e-4


def test_equal_results_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = run(monkeypatch, tmp_path / "out.json", "--runs", "60")
    assert report["runs"] == sum(row["runs"] for row in report["shapes"]) == 60
    assert [row["different"] for row in report["variants"]] == [0, 0]
    assert all(row["is_right"] and row["is_checked"] for row in report["shapes"])


def test_one_flipped_bit_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attend, calls = repeat.relu_attention, []

    def sometimes(*arguments: Any, **options: Any) -> Tensor:
        output = attend(*arguments, **options)
        calls.append(output)
        if len(calls) == 12:
            flipped = output.detach().clone()
            flipped.view(torch.int32)[0, 0, 0, 0] ^= 1
            return output + (flipped - output).detach()
        return output

    monkeypatch.setattr(repeat, "relu_attention", sometimes)
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path / "out.json", "--runs", "60")
    assert "60 runs, 1 different" in capsys.readouterr().out


def test_wrong_results_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    attend = repeat.relu_attention

    def off(*arguments: Any, **options: Any) -> Tensor:
        output = attend(*arguments, **options)
        return output if options.get("impl") == "reference" else 1.1 * output

    monkeypatch.setattr(repeat, "relu_attention", off)
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path / "out.json", "--runs", "10")
    counts = json.loads((tmp_path / "out.json").read_text())["variants"]
    assert [row["wrong"] for row in counts] == [2, 0]
    nan = {"rule": "relu", "errors": {"output": float("nan")}}
    assert not repeat.is_within(nan)


def test_the_time_limit_ends_the_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = run(monkeypatch, tmp_path / "out.json", "--runs", "1000000", "--seconds", "0")
    assert report["runs"] == 4
