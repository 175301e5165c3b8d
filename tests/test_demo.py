"""The demonstration runs from end to end, with models too small to be good."""

from pathlib import Path

import pytest

from reluformer.demo import demo

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


def test_the_demonstration_trains_translates_and_scores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo(tmp_path / "runs", SMALL, documents=2)
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
    demo(tmp_path / "runs", SMALL, documents=2)
    again = capsys.readouterr().out
    assert "trained already" in again
    assert again.partition("\n3.")[2] == first.partition("\n3.")[2] != ""
