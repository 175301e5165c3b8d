"""Closed forms and the synthetic tasks."""

import math

import pytest
import torch

from reluformer.study.tasks import SYMBOLS, TASKS, train_task
from reluformer.study.theory import QUANTITIES, SIZES, sample_quantities


def test_samples_agree_with_closed_forms() -> None:
    samples = sample_quantities(2**15, seed=1)
    assert len(samples) == len(QUANTITIES) * len(SIZES)
    exact = {quantity.name for quantity in QUANTITIES if quantity.exact}
    for sample in samples:
        if sample.quantity in exact or sample.n >= 1024:
            slack = 5 * sample.error + 0.02 * abs(sample.closed)
            assert abs(sample.measured - sample.closed) < slack, sample
    values = {(s.quantity, s.n): s.closed for s in samples}
    assert values["scaled ReLU row sum", 1024] == pytest.approx(18.05, abs=0.01)
    assert values["ReLU entropy", 4096] == pytest.approx(7.34, abs=0.01)
    assert values["scaled ReLU raw entropy", 1024] == pytest.approx(55.2, abs=0.1)


@pytest.mark.parametrize("name", TASKS)
def test_tasks_are_repeatable_and_ask_for_what_is_shown(name: str) -> None:
    batch, again = (TASKS[name](torch.Generator().manual_seed(3), 4, 6) for _ in range(2))
    assert torch.equal(batch.inputs, again.inputs) and torch.equal(batch.targets, again.targets)
    assert batch.mask.shape == batch.inputs.shape[:2] == batch.targets.shape[:2]
    assert batch.mask.any(dim=1).all()


def test_targets_of_recall_tasks() -> None:
    generator = torch.Generator().manual_seed(0)
    reverse = TASKS["reverse"](generator, 2, 5)
    symbols = reverse.inputs.argmax(dim=-1)
    assert torch.equal(reverse.targets[:, 5:], symbols[:, :5].flip(1))
    recall = TASKS["associative recall"](generator, 3, 6)
    keys = recall.inputs[..., :SYMBOLS].argmax(dim=-1)
    values = recall.inputs[..., SYMBOLS:].argmax(dim=-1)
    for row in range(3):
        at = int((keys[row, :-1] == keys[row, -1]).nonzero())
        assert recall.targets[row, -1] == values[row, at]
    sink = TASKS["sink trigger"](generator, 2, 5)
    at = int(sink.inputs[0, :, -1].argmax())
    mean = sink.inputs[0, : at + 1, :-1].mean(dim=0) * math.sqrt(at + 1)
    torch.testing.assert_close(sink.targets[0, at], mean)
    assert sink.targets[0].abs().sum(dim=-1).count_nonzero() == 1


def test_training_a_task_learns() -> None:
    size = {"width": 32, "length": 4, "seed": 1}
    assert train_task("softmax", "single-location recall", steps=120, **size) > 0.3
