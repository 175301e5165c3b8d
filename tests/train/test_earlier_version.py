"""Runs of earlier versions load and resume; `earlier_version/` holds stored settings of one."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from reluformer.checkpoint import load_run
from reluformer.config.migration import migrate
from reluformer.config.recipe import load_recipe
from reluformer.errors import UserError
from reluformer.train import train
from tests.train.tiny import tiny

STORED = Path(__file__).parent / "earlier_version"


def metrics(run: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        record.pop("tokens_per_second", None)
    return records


def test_a_run_of_an_earlier_version_resumes_with_identical_losses(
    tmp_path: Path, interrupted: Any
) -> None:
    recipe = tiny(rescale_scores=True)
    train(recipe, tmp_path / "whole", quiet=True)
    interrupted(5)
    with pytest.raises(KeyboardInterrupt):
        train(recipe, tmp_path / "resumed", quiet=True)
    shutil.copy(STORED / "recipe.yaml", tmp_path / "resumed" / "recipe.yaml")
    train(recipe, tmp_path / "resumed", quiet=True)
    assert metrics(tmp_path / "resumed") == metrics(tmp_path / "whole")


def test_a_model_of_an_earlier_version_loads(tmp_path: Path) -> None:
    recipe = tiny(rescale_scores=True)
    finished = train(recipe, tmp_path, quiet=True).model
    current = load_run(finished).model.config
    for name in ("config.json", "recipe.yaml"):
        shutil.copy(STORED / name, finished / name)
    run = load_run(finished)
    assert run.model.config == current and run.recipe == recipe


def test_hand_written_recipes_get_the_current_name_in_the_error() -> None:
    with pytest.raises(UserError, match="train.temper is not .* mean 'rescale_scores'"):
        tiny(temper=True)
    with pytest.raises(UserError, match="line 32: .*normalise is not .* mean 'row_normalise'"):
        load_recipe(STORED / "recipe.yaml")


def test_renamed_fields_of_metrics_and_options() -> None:
    old = {"step": 3, "tempered": {"factor": 1.5}, "x": [{"normalise": None}]}
    assert migrate(old) == {"step": 3, "rescaled": {"factor": 1.5}, "x": [{"row_normalise": None}]}
