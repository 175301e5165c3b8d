"""Checkpoints: round trip, atomic writes, pruning, and loading of models."""

from pathlib import Path
from typing import Any

import pytest
import torch

from reluformer import checkpoint
from reluformer.checkpoint import RunState, Tensors, load_run
from reluformer.data.tokenizer import Tokenizer
from reluformer.errors import UserError
from reluformer.model import ReLUFormer
from reluformer.model.pretrained import distinct_tensors
from reluformer.train.finalise import write_model
from tests.train.tiny import tiny

STATE = RunState(step=1200, position=(3, 7), tokens=10**12, best_nll=0.1 + 0.2, best_step=800)


def some_tensors() -> dict[str, Tensors]:
    return {
        "model": {"a": torch.randn(3, 4), "gamma": torch.tensor(0.1)},
        "optimizer": {"exp_avg/a": torch.randn(3, 4), "step/a": torch.tensor(3.0)},
        "ema": {"a": torch.randn(3, 4, dtype=torch.float64)},
    }


def test_a_checkpoint_survives_a_round_trip(tmp_path: Path) -> None:
    tensors = some_tensors()
    folder = checkpoint.save(tmp_path, STATE, tensors)
    assert folder.name == "step-00001200" and checkpoint.steps(tmp_path) == [1200]
    found = checkpoint.load(tmp_path, 1200)
    assert found.state == STATE
    assert found.tensors.keys() == tensors.keys()
    for kind, named in tensors.items():
        for name, tensor in named.items():
            assert torch.equal(found.tensors[kind][name], tensor)
            assert found.tensors[kind][name].dtype == tensor.dtype
    assert torch.equal(checkpoint.load_weights(tmp_path, 1200)["a"], tensors["model"]["a"])


def test_a_failed_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(checkpoint, "write_json", full)
    with pytest.raises(OSError, match="no space"):
        checkpoint.save(tmp_path, STATE, some_tensors())
    assert checkpoint.steps(tmp_path) == []
    assert list((tmp_path / checkpoint.CHECKPOINTS).iterdir()) == []


def test_incomplete_checkpoints_are_ignored_and_cleaned(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, STATE, some_tensors())
    for name in ("step-00001300.77.partial", "step-00000100.partial"):
        (tmp_path / checkpoint.CHECKPOINTS / name).mkdir()
        (tmp_path / checkpoint.CHECKPOINTS / name / "model.safetensors").write_bytes(b"half")
    (tmp_path / "run.json.77.partial").write_text("{")
    assert checkpoint.steps(tmp_path) == [1200]
    checkpoint.clean(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*.partial")) == []
    assert checkpoint.load(tmp_path, 1200).state == STATE


def test_pruning_keeps_the_last_and_the_protected(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        checkpoint.save(tmp_path, RunState(step=step), some_tensors())
    checkpoint.prune(tmp_path, keep=2, protected=[1])
    assert checkpoint.steps(tmp_path) == [1, 4, 5]
    checkpoint.prune(tmp_path, keep=2)
    assert checkpoint.steps(tmp_path) == [4, 5]
    assert len(list((tmp_path / checkpoint.CHECKPOINTS).iterdir())) == 2


def test_a_run_loads_from_its_folder_model_or_checkpoint(tmp_path: Path) -> None:
    recipe = tiny()
    tokenizer = Tokenizer.train(["a b c"] * 9, 280)
    recipe.save(tmp_path / "recipe.yaml")
    tokenizer.save(tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match="neither a finished model nor a checkpoint"):
        load_run(tmp_path)
    models = [ReLUFormer(recipe.model_with(tokenizer.vocab_size)) for _ in range(3)]
    for step, model in enumerate(models[:2], 1):
        checkpoint.save(tmp_path, RunState(step=step), {"model": distinct_tensors(model)})
    assert_loads(tmp_path, models[1], step=2)
    assert_loads(checkpoint.folder_of(tmp_path, 1), models[0], step=1)
    final = write_model(tmp_path, recipe, tokenizer, distinct_tensors(models[2]))
    assert_loads(tmp_path, models[2], step=None)
    assert_loads(final, models[2], step=None)
    Tokenizer.train(["hello world"] * 9, 280).save(final / "tokenizer.json")
    for load in (load_run, checkpoint.read_run):
        with pytest.raises(UserError, match=r"tokenizer.json has \d+ ids, but the model"):
            load(final)


def assert_loads(folder: Path, model: ReLUFormer, step: int | None) -> None:
    run = load_run(folder)
    assert run.step == step and run.recipe == tiny() and not run.model.training
    assert run.tokenizer.decode(run.tokenizer.encode("a c")) == "a c"
    stored = checkpoint.read_run(folder)
    assert stored.recipe == run.recipe
    for name, tensor in distinct_tensors(model).items():
        assert torch.equal(distinct_tensors(run.model)[name], tensor), name
        assert torch.equal(stored.model.lookup()(name), tensor), name


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    folder = checkpoint.save(tmp_path, STATE, some_tensors())
    (folder / "state.json").write_text('{"step": 1, "format": 99}')
    with pytest.raises(UserError, match="format 99"):
        checkpoint.load(tmp_path, 1200)
    (folder / "state.json").write_text("{")
    with pytest.raises(UserError, match="state.json cannot be read"):
        checkpoint.load(tmp_path, 1200)


def test_damaged_tensors_are_named(tmp_path: Path) -> None:
    file = checkpoint.save(tmp_path, STATE, some_tensors()) / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(UserError, match="optimizer.safetensors cannot be read: its header"):
        checkpoint.load(tmp_path, 1200)
    file.unlink()
    with pytest.raises(UserError, match="optimizer.safetensors is missing"):
        checkpoint.load(tmp_path, 1200)
