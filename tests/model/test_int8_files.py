"""Models in int8 on disk: what is stored, what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from reluformer.errors import UserError
from reluformer.model import ReLUFormer, int8_files
from reluformer.model.int8 import Int8Rows, quantise
from reluformer.model.pretrained import distinct_tensors, read_pretrained, save_int8
from tests.translation.native.models import random_model


def test_rows_are_rounded_to_their_own_scale() -> None:
    table = torch.tensor([[1.0, -2.54, 0.02], [0.0, 0.0, 0.0], [1e-30, 3e-30, -2e-30]])
    rows = quantise(table)
    assert rows.integers.tolist() == [[50, -127, 1], [0, 0, 0], [42, 127, -85]]
    assert rows.scales.tolist() == pytest.approx([0.02, 0.0, 3e-30 / 127])
    error = (rows.dequantise() - table).abs()
    assert (error <= 0.5001 * rows.scales.unsqueeze(1)).all()


def test_quantising_again_changes_nothing() -> None:
    rows = quantise(torch.randn(50, 33))
    again = quantise(rows.dequantise())
    assert torch.equal(again.integers, rows.integers)
    torch.testing.assert_close(again.scales, rows.scales)


@pytest.mark.parametrize("settings", [{}, {"tie_embeddings": False}, {"attention": "one gamma"}])
def test_a_saved_model_is_the_rounded_model(tmp_path: Path, settings: dict[str, object]) -> None:
    model = random_model(**settings)
    save_int8(model, tmp_path)
    loaded = ReLUFormer.from_pretrained(tmp_path)
    assert not loaded.training
    for name, value in distinct_tensors(model).items():
        wanted = quantise(value).dequantise() if value.dim() == 2 else value
        assert torch.equal(loaded.state_dict()[name], wanted), name
    stored = read_pretrained(ReLUFormer, tmp_path).lookup()
    for name in model.state_dict():
        assert isinstance(stored(name), Int8Rows) == (model.state_dict()[name].dim() == 2)


def test_shards_are_small_and_large_tables_are_divided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int8_files, "SHARD_BYTES", 2000)
    model = random_model()
    save_int8(model, tmp_path)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 3
    for file in files:
        assert sum(tensor.nbytes for tensor in load_file(file).values()) <= 2000
    loaded = ReLUFormer.from_pretrained(tmp_path)
    wanted = quantise(model.target_embedding.weight).dequantise()
    assert torch.equal(loaded.target_embedding.weight, wanted)


def _change_file(folder: Path, change: str) -> None:
    """Damage a saved model in one way."""
    file, config = folder / "int8-1.safetensors", folder / "config.json"
    tensors, description = load_file(file), json.loads(config.read_text())
    table = "target_embedding.weight"
    changes = {
        "scale missing": lambda: tensors.pop(f"{table}.scale"),
        "scale short": lambda: tensors.update({f"{table}.scale": torch.ones(3)}),
        "scale negative": lambda: tensors[f"{table}.scale"].neg_(),
        "scale nan": lambda: tensors[f"{table}.scale"].fill_(torch.nan),
        "minus 128": lambda: tensors[table].fill_(-128),
        "table missing": lambda: (tensors.pop(table), tensors.pop(f"{table}.scale")),
        "wrong shape": lambda: tensors.update({table: tensors[table][:, :-1].contiguous()}),
        "wrong type": lambda: tensors.update({"encoder_norm.bias": torch.ones(32).double()}),
        "block missing": lambda: tensors.update({
            f"{table}[7]": tensors.pop(table), f"{table}[7].scale": tensors.pop(f"{table}.scale"),
        }),
        "another tensor": lambda: tensors.update({"more": torch.ones(2)}),
        "files no list": lambda: description.update(files="int8-1.safetensors"),
        "no files": lambda: description.update(files=[]),
        "file outside": lambda: description.update(files=["../int8-1.safetensors"]),
        "file twice": lambda: description.update(files=["int8-1.safetensors"] * 2),
        "file missing": lambda: description.update(files=["int8-9.safetensors"]),
        "huge model": lambda: description["config"].update(width=2**40, heads=1),
        "other class": lambda: description.update(model="ReLUFormerLM"),
    }  # fmt: skip
    if change == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    elif change == "text":
        file.write_text("no tensors")
    else:
        changes[change]()
        save_file(tensors, file)
        config.write_text(json.dumps(description))


@pytest.mark.parametrize(
    "change",
    [
        "scale missing", "scale short", "scale negative", "scale nan", "minus 128",
        "table missing", "wrong shape", "wrong type", "block missing", "another tensor",
        "files no list", "no files", "file outside", "file twice", "file missing", "huge model",
        "other class", "cut", "text",
    ],
)  # fmt: skip
def test_damaged_files_are_refused_in_one_sentence(tmp_path: Path, change: str) -> None:
    save_int8(random_model(), tmp_path)
    _change_file(tmp_path, change)
    with pytest.raises(UserError) as refusal:
        ReLUFormer.from_pretrained(tmp_path)
    assert "\n" not in str(refusal.value)
    assert str(tmp_path) in str(refusal.value)
