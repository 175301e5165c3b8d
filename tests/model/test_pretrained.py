"""Saving and loading models."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from reluformer.errors import UserError
from reluformer.model import ReLUFormer, ReLUFormerLM, tensor_files
from tests.model.factory import batch, small, tokens


@pytest.mark.parametrize("changes", [{}, {"attention_gamma": "model"}, {"tie_embeddings": False}])
def test_round_trip(tmp_path: Path, changes: dict[str, object]) -> None:
    model, inputs = ReLUFormer(small(**changes)).eval(), batch()
    model.calibrate([inputs])
    model.save_pretrained(tmp_path / "model")
    loaded = ReLUFormer.from_pretrained(tmp_path / "model")
    assert loaded.config == model.config and not loaded.training
    assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)


def test_language_model_round_trip(tmp_path: Path) -> None:
    model, inputs = ReLUFormerLM(small("rela")).eval(), tokens(2, 5)
    model.save_pretrained(tmp_path)
    assert torch.equal(ReLUFormerLM.from_pretrained(tmp_path)(inputs).logits, model(inputs).logits)


def test_errors_name_the_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no saved model"):
        ReLUFormer.from_pretrained(tmp_path)
    ReLUFormerLM(small()).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="describes a ReLUFormerLM, not a ReLUFormer"):
        ReLUFormer.from_pretrained(tmp_path)
    path = tmp_path / "config.json"
    description = json.loads(path.read_text())
    description["config"]["widht"] = 16
    path.write_text(json.dumps(description))
    with pytest.raises(
        UserError, match=r"config\.widht is not a known field; did you mean 'width'"
    ):
        ReLUFormerLM.from_pretrained(tmp_path)
    description["config"].pop("widht")
    description["config"]["width"] = 32
    path.write_text(json.dumps(description))
    with pytest.raises(UserError, match="has shape"):
        ReLUFormerLM.from_pretrained(tmp_path)
    description["config"]["decoder_layers"] = 3
    path.write_text(json.dumps(description))
    with pytest.raises(UserError, match=r"'decoder\.2\.\S+' is missing from it"):
        ReLUFormerLM.from_pretrained(tmp_path)
    path.write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        ReLUFormerLM.from_pretrained(tmp_path)
    path.write_text('{"format": 99}')
    with pytest.raises(UserError, match="not of format 1"):
        ReLUFormerLM.from_pretrained(tmp_path)


def test_a_failed_save_leaves_the_old_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ReLUFormerLM(small())
    model.save_pretrained(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()

    def fail(tensors: object, path: Path) -> None:
        Path(path).write_bytes(b"half")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(tensor_files, "save_file", fail)
    with pytest.raises(OSError, match="No space left on device") as caught:
        model.save_pretrained(tmp_path)
    assert caught.value.filename == str(tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_weights_have_the_permissions_of_the_configuration(tmp_path: Path) -> None:
    ReLUFormerLM(small()).save_pretrained(tmp_path)
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    ReLUFormerLM(small()).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match="model.safetensors cannot be read: Error"):
        ReLUFormerLM.from_pretrained(tmp_path)
