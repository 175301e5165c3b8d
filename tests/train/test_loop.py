"""The training loop: exact resumption, final models, and refused folders."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from reluformer import checkpoint
from reluformer.checkpoint import load_run
from reluformer.errors import UserError
from reluformer.files import write_json
from reluformer.model.pretrained import distinct_tensors
from reluformer.train import loop, train
from tests.train.tiny import tiny


def metrics(run: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        record.pop("tokens_per_second", None)
    return records


def weights(run: Path) -> dict[str, torch.Tensor]:
    return distinct_tensors(load_run(run).model)


def assert_same(first: Path, second: Path) -> None:
    assert metrics(first) == metrics(second)
    for name, tensor in weights(first).items():
        assert torch.equal(tensor, weights(second)[name]), name


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_interrupted_run_resumes_exactly(
    tmp_path: Path, interrupted: Any, accumulate: int
) -> None:
    # Dropout and sampled rows draw random numbers; log_every does not divide checkpoint_every.
    recipe = tiny(
        accumulate=accumulate, steps=9, log_every=2, checkpoint_every=3, sample_rows=4, ema=0.9
    )
    train(recipe, tmp_path / "whole", quiet=True)
    for step in (2, 5, 9):
        interrupted(step)
        with pytest.raises(KeyboardInterrupt):
            train(recipe, tmp_path / "parts", quiet=True)
    train(recipe, tmp_path / "parts", quiet=True)
    assert_same(tmp_path / "whole", tmp_path / "parts")
    assert [r["step"] for r in metrics(tmp_path / "parts")] == [0, 2, 3, 4, 6, 8, 9]
    starts = json.loads((tmp_path / "parts" / "run.json").read_text())["starts"]
    assert [start["step"] for start in starts] == [0, 0, 3, 6]


def test_a_checkpoint_without_its_moving_average_is_refused(
    tmp_path: Path, interrupted: Any
) -> None:
    interrupted(5)
    with pytest.raises(KeyboardInterrupt):
        train(tiny(ema=0.9), tmp_path, quiet=True)
    (checkpoint.folder_of(tmp_path, 4) / "ema.safetensors").unlink()
    with pytest.raises(UserError, match=r"ema.safetensors is missing; delete the folder"):
        train(tiny(ema=0.9), tmp_path, quiet=True)


def test_after_deleting_a_damaged_checkpoint_a_run_resumes_from_the_previous_one(
    tmp_path: Path, interrupted: Any
) -> None:
    recipe = tiny(steps=6, checkpoint_every=2)
    interrupted(5)
    with pytest.raises(KeyboardInterrupt):
        train(recipe, tmp_path / "parts", quiet=True)
    folder = checkpoint.folder_of(tmp_path / "parts", 4)
    (folder / "model.safetensors").write_bytes(b"x" * 99)
    with pytest.raises(UserError, match=f"cannot be read: .*; delete the folder {folder}"):
        train(recipe, tmp_path / "parts", quiet=True)
    shutil.rmtree(folder)
    train(recipe, tmp_path / "parts", quiet=True)
    train(recipe, tmp_path / "whole", quiet=True)
    assert_same(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("run.json", {"data": 5}, r"run.json.data must be a mapping, got 5"),
        ("run.json", {"starts": None}, r"run.json.starts must be a list, got nothing"),
        ("checkpoints/step-00000004/state.json", {"position": []}, "position must have 2 values"),
    ],
)
def test_damaged_descriptions_are_refused_in_one_sentence(
    tmp_path: Path, interrupted: Any, file: str, damage: dict[str, Any], message: str
) -> None:
    interrupted(5)
    with pytest.raises(KeyboardInterrupt):
        train(tiny(), tmp_path, quiet=True)
    path = tmp_path / file
    write_json(path, {**json.loads(path.read_text()), **damage})
    with pytest.raises(UserError, match=message):
        train(tiny(), tmp_path, quiet=True)


def test_runs_are_reproducible_and_seeds_matter(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train(tiny(seed=seed, steps=2), tmp_path / name, quiet=True)
    assert_same(tmp_path / "a", tmp_path / "b")
    assert metrics(tmp_path / "a") != metrics(tmp_path / "c")


def test_the_folder_describes_the_run(tmp_path: Path) -> None:
    recipe = tiny(keep=2, device=None)
    trained = train(recipe, tmp_path, quiet=True)
    assert trained.model == tmp_path / "model"
    assert checkpoint.steps(tmp_path) == [4, 6]
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["recipe"] == recipe.hash and run["seed"] == 1
    assert set(run["data"]) == {"tokenizer", "train", "dev"}
    assert run["starts"][0]["versions"]["torch"] == torch.__version__
    found = load_run(tmp_path)
    assert found.recipe == recipe
    records = metrics(tmp_path)
    assert [r["step"] for r in records] == list(range(7))
    assert [r["step"] for r in records if "dev" in r] == [3, 6]
    assert set(records[1]["attention"]) == {"encoder", "decoder", "cross"}
    # Calibration sets the initial row sum of each site to `row_sum_init`.
    for site in records[0]["attention"].values():
        assert site["row_sum"] == pytest.approx(1.0, abs=0.15)
    assert [str(p) for p in tmp_path.rglob("*.partial")] == []


def test_a_finished_run_is_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny(steps=1), tmp_path, quiet=True)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    monkeypatch.setattr(loop, "load_data", None)
    train(tiny(steps=1), tmp_path, quiet=True)
    # Settings that do not change the result may differ.
    train(tiny(steps=1, log_every=9), tmp_path, quiet=True)
    assert capsys.readouterr().err == ""
    train(tiny(steps=1), tmp_path)
    assert capsys.readouterr().err == f"{tmp_path} is finished already: {tmp_path / 'model'}\n"
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    with pytest.raises(UserError, match=r"another recipe: train.lr is 0.005 there and 1.0 here"):
        train(tiny(steps=1, lr=1.0), tmp_path, quiet=True)


def test_torch_settings_are_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, bool]] = []

    def looking(recipe: Any) -> Any:
        seen.append((torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()))
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "load_data", looking)
    torch.use_deterministic_algorithms(False)
    with pytest.raises(KeyboardInterrupt):
        train(tiny(threads=2, deterministic=True), tmp_path, quiet=True)
    assert seen == [(2, True)] and torch.get_num_threads() == 1
    assert not torch.are_deterministic_algorithms_enabled()


def test_folders_that_are_not_runs_are_refused_and_not_changed(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds thesis.txt and is not a run"):
        train(tiny(), tmp_path, quiet=True)
    with pytest.raises(UserError, match="is not a folder"):
        train(tiny(), tmp_path / "thesis.txt", quiet=True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_invalid_settings_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    missing = str(tmp_path / "nothing")
    for message, wrong in {
        "perfect square": {"model__memory": "product_key_relu", "model__slots": 15},
        "nothing does not exist": {"data__source": missing, "data__generated": None},
        "data.max_length must fit": {"data__max_length": 3, "data__generated__lengths": [5, 9]},
    }.items():
        with pytest.raises(UserError, match=message):
            train(tiny(**wrong), tmp_path / "run", quiet=True)
        assert not (tmp_path / "run").exists()


def test_a_failure_of_the_compiler_names_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.exc import TorchDynamoException

    def fail(*arguments: Any) -> None:
        raise TorchDynamoException("no C++ compiler\nwith details")

    monkeypatch.setattr(loop, "_train", fail)
    with pytest.raises(UserError, match=r"train.compile=false trains .*: no C\+\+ compiler$"):
        train(tiny(), tmp_path)


def test_changed_data_is_refused(tmp_path: Path, interrupted: Any) -> None:
    interrupted(5)
    with pytest.raises(KeyboardInterrupt):
        train(tiny(), tmp_path, quiet=True)
    run = json.loads((tmp_path / "run.json").read_text())
    run["data"]["train"] = "0" * 64
    write_json(tmp_path / "run.json", run)
    with pytest.raises(UserError, match="other data: the checksum of train"):
        train(tiny(), tmp_path, quiet=True)


def test_two_processes_cannot_train_in_one_folder(tmp_path: Path) -> None:
    from reluformer.train.run_dir import locked

    with locked(tmp_path), pytest.raises(UserError, match="in use by another"):
        train(tiny(), tmp_path, quiet=True)
    train(tiny(steps=1), tmp_path, quiet=True)


def test_the_folder_may_be_a_link_to_one_that_does_not_exist_yet(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to(tmp_path / "disk" / "run")
    train(tiny(steps=1), tmp_path / "run", quiet=True)
    assert (tmp_path / "run").is_symlink() and (tmp_path / "disk" / "run" / "model").is_dir()


def test_early_stopping_ends_the_run_with_its_best_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = iter([3.0, 2.0, 2.5, 2.0, 1.0])
    monkeypatch.setattr(loop, "dev_loss", lambda *arguments: next(measured))
    recipe = tiny(steps=99, dev_every=1, patience=2, final="best", checkpoint_every=50, keep=1)
    train(recipe, tmp_path, quiet=True)
    assert [r["dev"]["nll"] for r in metrics(tmp_path)[1:]] == [3.0, 2.0, 2.5, 2.0]
    assert checkpoint.steps(tmp_path) == [2, 4]
    best, last = (checkpoint.load(tmp_path, step) for step in (2, 4))
    assert last.state.stopped and last.state.best_step == 2 and last.state.stale == 2
    for name, tensor in weights(tmp_path).items():
        assert torch.equal(tensor, best.tensors["model"][name])


def test_a_run_killed_before_its_model_was_written_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*arguments: Any) -> None:
        raise KeyboardInterrupt

    train(tiny(), tmp_path / "whole", quiet=True)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "finish", killed)
        with pytest.raises(KeyboardInterrupt):
            train(tiny(), tmp_path / "parts", quiet=True)
    assert not (tmp_path / "parts" / "model").exists()
    train(tiny(), tmp_path / "parts", quiet=True)
    assert_same(tmp_path / "whole", tmp_path / "parts")


def test_averages_are_means_of_the_last_checkpoints(tmp_path: Path) -> None:
    train(tiny(final="average", average_last=2, keep=3), tmp_path, quiet=True)
    assert checkpoint.steps(tmp_path) == [2, 4, 6]
    last, before = (checkpoint.load_weights(tmp_path, step) for step in (6, 4))
    for name, tensor in weights(tmp_path).items():
        torch.testing.assert_close(tensor, (last[name] + before[name]) / 2)


def test_the_moving_average_follows_the_weights(tmp_path: Path) -> None:
    train(tiny(final="ema", ema=0.99, checkpoint_every=1, keep=9), tmp_path, quiet=True)
    moving = None
    for step in range(1, 7):
        tensors = checkpoint.load(tmp_path, step).tensors
        now = tensors["model"]["target_embedding.weight"].double()
        if moving is not None:
            decay = min(0.99, (1 + step) / (10 + step))
            moving = decay * moving + (1 - decay) * now
            torch.testing.assert_close(tensors["ema"]["target_embedding.weight"].double(), moving)
        moving = tensors["ema"]["target_embedding.weight"].double()
    assert torch.equal(weights(tmp_path)["target_embedding.weight"].double(), moving)
