"""The examples run. Their printed results need more steps than a test has."""

import runpy
import sys
from pathlib import Path

import pytest

from tests.nn.timm_import import load_timm

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str) -> None:
    """Run an example as a program."""
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.mark.slow
def test_torch_transformer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["example", "--steps", "6"])
    run("torch_transformer.py")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["softmax", "normalised_relu"]
    losses = [float(line.split()[3]) for line in lines]
    # Both start from the same weights, and the attentions are alike for small scores.
    assert losses[0] < 9 and abs(losses[0] - losses[1]) < 0.1


@pytest.mark.slow
def test_timm_vit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    load_timm()
    monkeypatch.setattr(sys, "argv", ["example", "--steps", "6"])
    run("timm_vit.py")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["softmax", "normalised_relu"]
    losses = [float(line.split()[3]) for line in lines]
    assert losses[0] < 1.5 and abs(losses[0] - losses[1]) < 0.1
