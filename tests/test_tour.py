"""The training tour runs from end to end, with tiny models."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from reluformer.cli import app
from reluformer.errors import UserError
from reluformer.tour import RECIPE, tour
from reluformer.train.run_dir import locked

SMALL = [
    "data.generated.train=40",
    "data.generated.dev=2",
    "data.generated.lengths=[1, 1]",
    "data.generated.vocab_size=600",
    "decode.beam=1",
    "model.width=16",
    "model.encoder_layers=1",
    "model.decoder_layers=1",
    "model.slots=16",
    "train.steps=2",
    "train.warmup=1",
    "train.bleu_every=null",
    "train.calibration_batches=1",
]


class InProcess:
    """Replaces the subprocess of a training run by a call in this process."""

    def __init__(self, run: Path, settings: list[str]) -> None:
        options = [part for setting in settings for part in ("--set", setting)]
        done = CliRunner().invoke(app, ["train", RECIPE, "--out", str(run), *options])
        run.parent.mkdir(exist_ok=True)
        (run.parent / f"{run.name}.log").write_text(done.output, encoding="utf-8")
        self.status = done.exit_code

    def poll(self) -> int:
        return self.status

    wait = poll

    def terminate(self) -> None:
        pass


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reluformer.tour._start", InProcess)


def test_the_tour_trains_translates_and_scores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tour(tmp_path / "runs", SMALL, documents=2)
    first = capsys.readouterr().out
    for part in (
        "weights(q K^T) V",
        "Trained 2 steps",
        "ReLUFormer",
        "d-BLEU",
        "tok:13a",
        "softmax",
    ):
        assert part in first
    tour(tmp_path / "runs", SMALL, documents=2)
    again = capsys.readouterr().out
    assert "trained already" in again
    assert again.partition("\n3.")[2] == first.partition("\n3.")[2] != ""


def test_runs_of_other_settings_are_refused(tmp_path: Path) -> None:
    tour(tmp_path, SMALL, documents=2)
    with pytest.raises(UserError, match="another recipe: train.lr is 0.004 there and 0.1 here"):
        tour(tmp_path, [*SMALL, "train.lr=0.1"], documents=2)


def test_a_failed_training_ends_the_other_and_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []

    class Endless(InProcess):
        """Runs until it fails or is terminated."""

        def poll(self) -> int | None:  # type: ignore[override]
            return self.status or None

        def terminate(self) -> None:
            ended.append(self.status)

    monkeypatch.setattr("reluformer.tour._start", Endless)
    with locked(tmp_path / "relu"), pytest.raises(UserError, match="ReLU failed: .* in use by"):
        tour(tmp_path, SMALL, documents=2)
    assert ended == [2, 0]
