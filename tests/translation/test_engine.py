"""Which code computes translations, and that a request by name is never replaced."""

import logging
from pathlib import Path

import pytest
import torch

from reluformer.cli import app
from reluformer.config.recipe import Recipe, load_recipe
from reluformer.data.tokenizer import Tokenizer
from reluformer.errors import UserError
from reluformer.model import ReLUFormer
from reluformer.model.pretrained import distinct_tensors
from reluformer.ops.backends.cpu.native import library
from reluformer.quantise import quantise_run
from reluformer.train.finalise import write_model
from reluformer.translation.engine import NativeEngine, TorchEngine
from reluformer.translation.translator import Translator
from tests.translation.native.conftest import kernels, native  # noqa: F401

TEXT = "the cat sat on the mat\nthe dog"
OVERRIDES = ("model.width=32", "model.heads=2", "model.slots=64", "decode.beam=2")


def write_run(folder: Path, *overrides: str) -> Path:
    """A finished run with random weights."""
    torch.manual_seed(1)
    recipe: Recipe = load_recipe("tiny", (*OVERRIDES, *overrides))
    tokenizer = Tokenizer.train(["the cat sat on the mat", "the dog ate the cat"] * 3, 290)
    model = ReLUFormer(recipe.model_with(tokenizer.vocab_size))
    write_model(folder, recipe, tokenizer, distinct_tensors(model))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def load(folder: Path, **options: str) -> Translator:
    return Translator.load(folder, device="cpu", max_ratio=1, max_extra=5, **options)


def test_auto_is_native_and_equals_torch(run: Path) -> None:
    auto, torch_only = load(run), load(run, decoder="torch")
    assert isinstance(auto.engine, NativeEngine) and auto.engine.native.precision == "float32"
    assert isinstance(torch_only.engine, TorchEngine)
    assert auto(TEXT) == torch_only(TEXT)
    assert auto.document(TEXT) == torch_only.document(TEXT)


def test_maps_use_the_model_in_torch(run: Path) -> None:
    translator = load(run)
    with translator.recording() as maps:
        translator(TEXT)
    assert len(maps) == 2 and isinstance(translator.model, ReLUFormer)


def test_a_checkpoint_without_a_finished_model(run: Path) -> None:
    with pytest.raises(UserError, match="neither a finished model nor a checkpoint"):
        load(run.parent)


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_weights_in_other_precisions(run: Path, precision: str) -> None:
    translator = load(run, precision=precision)
    assert isinstance(translator.engine, NativeEngine)
    assert translator.engine.native.precision == precision
    assert len(translator(TEXT).split("\n")) == 2


def test_an_int8_folder(run: Path, tmp_path: Path) -> None:
    size = quantise_run(run, tmp_path / "int8")
    assert size == sum(file.stat().st_size for file in (tmp_path / "int8").iterdir())
    stored, rounded = load(tmp_path / "int8"), load(run, precision="int8")
    assert isinstance(stored.engine, NativeEngine) and stored.engine.native.precision == "int8"
    assert stored(TEXT) == rounded(TEXT)
    dequantised = load(tmp_path / "int8", decoder="torch")
    assert load(tmp_path / "int8", precision="float32")(TEXT) == dequantised(TEXT)


def test_quantise_overwrites_nothing(run: Path) -> None:
    before = sorted(run.rglob("*"))
    with pytest.raises(UserError, match="out must be a new or empty folder"):
        quantise_run(run, run)
    assert sorted(run.rglob("*")) == before


def test_the_command_quantise(run: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    done = CliRunner().invoke(app, ["quantise", str(run), "--out", str(tmp_path / "new")])
    assert done.exit_code == 0 and " MB" in done.stdout
    assert (tmp_path / "new" / "int8-1.safetensors").is_file()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decoder": "native"}, "decoder is 'native', but .* it has no tra attention"),
        ({"precision": "int8"}, "precision is 'int8', but .* it has no tra attention"),
        ({"decoder": "torch", "precision": "int8"}, "precision is 'int8', but .* 'torch'"),
        ({"decoder": "gpu"}, "decoder must be one of auto, native, torch, got 'gpu'"),
        ({"precision": "int4"}, "precision must be one of float32, bfloat16, int8, got 'int4'"),
    ],
)
def test_a_request_by_name_is_refused(
    tmp_path: Path, options: dict[str, str], message: str
) -> None:
    folder = write_run(tmp_path / "run", "model.attention.kind=tra")
    with pytest.raises(UserError, match=message):
        load(folder, **options)
    assert isinstance(load(folder).engine, TorchEngine)


def test_without_the_library_one_line_says_so(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "load", lambda: None)
    with caplog.at_level(logging.WARNING, "reluformer"):
        assert isinstance(load(run).engine, TorchEngine)
    assert [record.getMessage() for record in caplog.records] == [
        "torch decodes, because the native library cannot be used: it is not built "
        "(python -m reluformer.ops.backends.cpu.native builds it)"
    ]
    with pytest.raises(UserError, match="it is not built"):
        load(run, decoder="native")
