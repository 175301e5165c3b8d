"""The examples about transformers run; their results need more steps than a test has."""

import json
import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.mark.slow
def test_llama_generate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("llama_generate.py", monkeypatch, "--steps", "3")
    out = capsys.readouterr().out
    assert "the same without a cache: True" in out
    assert "loaded with normalised_relu attention, the same logits: True" in out


@pytest.mark.slow
def test_trainer_callback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("trainer_callback.py", monkeypatch, "--steps", "6")
    out = capsys.readouterr().out
    assert "'dead_rows'" in out and "of 64 sentences" in out


@pytest.mark.slow
def test_weight_maps_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    notebook = json.loads((EXAMPLES / "weight_maps.ipynb").read_text(encoding="utf-8"))
    names: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"]
            exec("".join(cell["source"]), names)
    maps = names["maps"]
    assert isinstance(maps, dict) and len(maps) == 12
    assert (
        float(maps["relu"].sum()) > 0
        and float((maps["softmax"].sum(dim=-1) - 1).abs().max()) < 1e-5
    )
    figure = names["figure"]
    assert len(figure.axes) == 12  # type: ignore[attr-defined]
    matplotlib.pyplot.close("all")
