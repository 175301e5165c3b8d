"""The profile of training steps times some steps and stops the training."""

import pytest

from benchmarks.step_profile import Watch, measure
from reluformer.errors import UserError
from reluformer.train import loop

SMALL = [
    "data.source=reverse", "data.max_length=16", "model.width=16", "model.heads=2",
    "model.slots=16", "model.encoder_layers=1", "model.decoder_layers=1", "train.batch_tokens=256",
    "train.device=cpu", "train.compile=false",
]  # fmt: skip


def test_steps_are_timed_and_profiled() -> None:
    before = loop._Loop
    result = measure(
        [*SMALL, "data.generated={train: 93, dev: 20, vocab_size: 280}"], Watch(1, 2, 1)
    )
    assert loop._Loop is before
    assert result["step_ms"] > 0
    kernels = result["kernels"]
    assert kernels == sorted(kernels, key=lambda row: -row["ms"])
    assert any("mm" in row["name"] and row["launches"] >= 1 for row in kernels)


def test_a_training_without_enough_steps_is_refused() -> None:
    with pytest.raises(UserError, match=r"train.steps must be at least 7, got 6"):
        measure([*SMALL, "train.steps=6", "train.warmup=1"], Watch(5, 1, 1))
