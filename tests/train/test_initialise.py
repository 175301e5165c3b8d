"""Runs that start with the finished weights of another run."""

import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from reluformer import checkpoint
from reluformer.checkpoint import RunState
from reluformer.config.recipe import first_difference
from reluformer.errors import UserError
from reluformer.model import ReLUFormer
from reluformer.model.config import AttentionConfig, ModelConfig
from reluformer.processes import Processes
from reluformer.train import train
from reluformer.train.data import load_data
from reluformer.train.initialise import (
    _check_same_rule,
    autocast,
    initialise,
    load_start_weights,
)
from tests.train.test_loop import assert_same, metrics, weights
from tests.train.tiny import tiny

ATTENTION = {"kind": "relu", "threshold": "head"}


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on short examples, with all that is learned, averaged and rescaled."""
    folder = tmp_path_factory.mktemp("runs") / "short"
    recipe = tiny(
        model__attention=ATTENTION, data__max_length=8, lr=0.02, rescale_scores=True,
        final="average", average_last=2,
    )  # fmt: skip
    train(recipe, folder, quiet=True)
    return folder


def long(short: Path | str, **fields: Any) -> Any:
    return tiny(**{"model__attention": ATTENTION, "start_from": str(short), **fields})


def test_the_first_step_starts_with_the_finished_weights(short: Path, tmp_path: Path) -> None:
    # Settings without tensors may differ; calibration to this row sum would change gamma.
    attention = {**ATTENTION, "impl": "reference", "row_sum_init": 5.0}
    recipe = long(short, model__attention=attention, model__dropout=0.3, ema=0.9)
    data, alone = load_data(recipe), Processes(0, 1, torch.device("cpu"))
    model = ReLUFormer(recipe.model_with(data.tokenizer.vocab_size))
    load_start_weights(model, recipe, data)
    found = initialise(recipe, tmp_path, alone, data, model)
    assert found.state == RunState() and not found.trainer.optimizer.state
    tensors = found.trainer.tensors()
    names = [name for name in tensors["model"] if name.endswith(("log_gamma", "threshold"))]
    assert len(names) == 6
    for name, tensor in weights(short).items():
        assert torch.equal(tensors["model"][name], tensor), name
        assert torch.equal(tensors["ema"][name], tensor), name


def test_training_continues_with_its_own_schedule(short: Path, tmp_path: Path) -> None:
    train(long(short, steps=1, lr=1e-12), tmp_path / "run", quiet=True)
    for name, tensor in weights(tmp_path / "run").items():
        torch.testing.assert_close(tensor, weights(short)[name], rtol=0, atol=1e-9)
    assert [record.get("lr") for record in metrics(tmp_path / "run")] == [None, 5e-13]


def test_an_interrupted_run_resumes_exactly_without_the_first_run(
    short: Path, tmp_path: Path, interrupted: Any
) -> None:
    gone = tmp_path / "short"
    shutil.copytree(short, gone)
    recipe = long(gone, steps=5, ema=0.9)
    train(recipe, tmp_path / "whole", quiet=True)
    # Before the first checkpoint and after it.
    for step in (2, 4):
        interrupted(step)
        with pytest.raises(KeyboardInterrupt):
            train(recipe, tmp_path / "parts", quiet=True)
    assert checkpoint.steps(tmp_path / "parts") == [2]
    shutil.rmtree(gone)
    train(recipe, tmp_path / "parts", quiet=True)
    assert_same(tmp_path / "whole", tmp_path / "parts")
    # A finished run is not changed.
    train(recipe, tmp_path / "whole", quiet=True)


def test_a_relative_folder_or_the_model_itself(
    short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(short.parent)
    for name, folder in (("run", "short"), ("model", "short/model")):
        train(long(folder, steps=1), tmp_path / name, quiet=True)
    assert_same(tmp_path / "run", tmp_path / "model")


def test_start_from_is_part_of_the_identity_of_a_recipe(short: Path) -> None:
    difference = first_difference(long(short), long("other"))
    assert difference == f"train.start_from is {str(short)!r} there and 'other' here"


def test_runs_without_a_finished_model_are_refused(
    short: Path, tmp_path: Path, interrupted: Any
) -> None:
    unfinished = tmp_path / "unfinished"
    interrupted(4)
    with pytest.raises(KeyboardInterrupt):
        train(tiny(), unfinished, quiet=True)
    assert checkpoint.steps(unfinished) == [2]
    for folder in (tmp_path / "nothing", unfinished):
        message = f"train.start_from must be a run with a finished model, got {str(folder)!r}"
        with pytest.raises(UserError, match=re.escape(message)):
            train(long(folder), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"data__generated__seed": 1}, r"short was .* another tokenizer .* data.source reverse: "),
        ({"model__decoder_layers": 2}, r"'decoder.1.* is missing from it"),
        ({"model__attention": {"kind": "softmax"}}, "log_gamma' is unknown in it"),
        ({"model__attention": {**ATTENTION, "power": 8}}, "short was .* power 4 in .* is 8 here"),
        ({"model__slots": 32}, r"has shape \[16.*\], expected \[32.*\]"),
    ],
)
def test_runs_that_do_not_fit_are_refused_before_anything_is_written(
    short: Path, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match="^train.start_from .*" + message):
        train(long(short, **fields), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


PAPER = {"threshold": "fixed", "threshold_init": 0.0}


@pytest.mark.parametrize(
    ("there", "here", "message"),
    [
        ({"alpha": 1.7}, {}, "alpha 1.7 in the encoder attention, .*options.alpha is 1.5 here"),
        ({}, {"alpha": 1.7}, "alpha 1.5 in the encoder attention, .*options.alpha is 1.7 here"),
        ({"alpha": 1.5}, {}, None),
        ({}, {"alpha": 1.5}, None),
    ],
)
def test_missing_options_have_their_defaults(
    there: dict[str, Any], here: dict[str, Any], message: str | None
) -> None:
    there, here = ({"kind": "entmax", "options": options} for options in (there, here))
    _check(there, here, message)


@pytest.mark.parametrize(
    ("there", "here", "message"),
    [
        ({}, PAPER, "threshold kept with the weights .* model.attention.threshold is 0.0 here"),
        ({"threshold": "fixed"}, PAPER, "threshold kept with the weights"),
        ({}, {"options": {"gamma": 2.0}}, "gamma kept .* model.attention.options.gamma is 2.0"),
        (
            {"options": {"negative_slope": 0.1}, "row_normalise": None},
            {"row_normalise": None},
            "slope 0.1",
        ),
        # Fixed values may become learned, and learned values may become fixed.
        (PAPER, {}, None),
        (PAPER, PAPER, None),
        ({}, {"threshold": "fixed"}, None),
    ],
)
def test_thresholds_and_gamma_must_keep_their_meaning(
    there: dict[str, Any], here: dict[str, Any], message: str | None
) -> None:
    _check(there, here, message)


def test_errors_name_the_section_of_a_site() -> None:
    found, model = (
        ReLUFormer(
            ModelConfig(20, 8, 2, slots=4, encoder_layers=1, decoder_layers=1, cross_attention=own)
        )
        for own in (None, AttentionConfig(power=8))
    )
    message = "power 4 in the cross attention, model.cross_attention.power is 8 here"
    with pytest.raises(UserError, match=message):
        _check_same_rule(found, model, "run")


def _check(there: dict[str, Any], here: dict[str, Any], message: str | None) -> None:
    """Whether weights of a model with one attention may start one with another."""
    found, model = (
        ReLUFormer(
            ModelConfig(
                20, 8, 2, slots=4, encoder_layers=1, decoder_layers=1,
                attention=AttentionConfig(**attention),
            )
        )
        for attention in (there, here)
    )  # fmt: skip
    refused = nullcontext() if message is None else pytest.raises(UserError, match=message)
    with refused:
        _check_same_rule(found, model, "run")


@pytest.mark.parametrize("precision", [None, "float32", "bfloat16"])
def test_products_have_the_precision_of_the_recipe(precision: str | None) -> None:
    ones = torch.ones(2, 2)
    with autocast(tiny(precision=precision).train, torch.device("cpu"))():
        product = ones @ ones
    assert product.dtype == getattr(torch, precision or "float32")
