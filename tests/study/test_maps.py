"""Attention maps of a study's models."""

from pathlib import Path

import pytest

from reluformer.study.budgets import BUDGETS
from reluformer.study.cells import Outcome
from reluformer.study.definition import Plan
from reluformer.study.maps import study_maps
from reluformer.study.registry import STUDIES


@pytest.mark.parametrize("kept", [True, False])
def test_cells_without_models_have_no_maps(tmp_path: Path, kept: bool) -> None:
    """Results are kept without weights, also without the folder of the cell."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for side in ("source", "target"):
        (corpus / f"test.{side}.txt").write_text("one two three four five six seven eight nine\n")
    study = STUDIES["attention"]
    cells = study.plan(Plan(BUDGETS["tiny"], {}))
    outcomes = [Outcome(cell.name, cell.labels, "finished", {}) for cell in cells]
    for outcome in outcomes if kept else []:
        (tmp_path / outcome.name).mkdir()
        outcome.save(tmp_path / outcome.name)
    assert study_maps(study, outcomes, tmp_path, {"europarl-sent": corpus}) == []


def test_models_at_the_best_rate_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test.source.txt").write_text("")
    (tmp_path / "test.target.txt").write_text("")
    shown = []

    def load_run(folder: Path) -> None:
        shown.append(folder.name)

    monkeypatch.setattr("reluformer.study.maps.finished_model", lambda folder: folder)
    monkeypatch.setattr("reluformer.study.maps.load_run", load_run)
    monkeypatch.setattr("reluformer.study.maps.model_maps", lambda *_, **__: {})
    outcomes = [
        Outcome(
            f"{kind}.{rate}", {"attention": kind, "rate": rate, "seed": 1}, "finished",
            {"dev_nll": loss}, {"corpus": "europarl-sent"},
        )
        for kind in ("softmax", "default")
        for rate, loss in ((1e-3, 1.8), (2e-3, 1.7))
    ]  # fmt: skip
    study_maps(STUDIES["attention"], outcomes, tmp_path, {"europarl-sent": tmp_path})
    assert shown == ["softmax.0.002", "default.0.002"]
