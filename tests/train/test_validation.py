"""Validation: dev loss, dev BLEU and statistics of attention."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from reluformer.data.packing import ExampleSpans
from reluformer.data.tokenizer import SEP
from reluformer.model import ReLUFormer
from reluformer.model.losses import translation_loss
from reluformer.processes import Processes
from reluformer.train import validation
from reluformer.train.data import Split, TrainingData, load_data
from reluformer.train.objective import inputs
from reluformer.translation.search import Hypothesis
from tests.train.tiny import tiny

ALONE = Processes(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def data() -> TrainingData:
    return load_data(tiny())


def the_split(data: TrainingData) -> Split:
    assert data.dev is not None
    return data.dev


def test_dev_loss_does_not_depend_on_batches_or_dropout(data: TrainingData) -> None:
    model = ReLUFormer(tiny(model__dropout=0.5).model_with(data.tokenizer.vocab_size)).train()
    found = [
        validation.dev_loss(
            model, the_split(data).batches(tiny(batch_tokens=size)), ALONE, nullcontext
        )
        for size in (16, 256)
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert model.training and torch.is_grad_enabled()
    model.eval()
    total, tokens = 0.0, 0
    for batch in the_split(data).batches(tiny()).epoch(0):
        logits = model(**inputs(batch)).logits
        total += float(translation_loss(logits, batch.target_out, pad_id=0)[1])
        tokens += batch.target_tokens
    assert found[1] == pytest.approx(total / tokens, rel=1e-6)


def test_bleu_compares_each_translation_with_its_reference(
    data: TrainingData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search that knows the task scores 100, wherever sorting by length put an example."""
    seen: list[int] = []

    def reversing(model: Any, sources: Sequence[list[int]], *rest: Any, **more: Any) -> Any:
        seen.append(len(sources))
        texts = [" ".join(reversed(data.tokenizer.decode(ids).split())) for ids in sources]
        return [Hypothesis(data.tokenizer.encode(text), 0.0, 0.0, True) for text in texts]

    model = ReLUFormer(tiny().model_with(data.tokenizer.vocab_size))
    monkeypatch.setattr(validation, "_BLEU_BATCH", 4)
    with monkeypatch.context() as patch:
        patch.setattr(validation, "search", reversing)
        bleu = validation.dev_bleu(model, data.tokenizer, the_split(data), examples=10)
    assert seen == [4, 4, 2] and bleu == pytest.approx(100)
    # An untrained model has no matches.
    assert validation.dev_bleu(model, data.tokenizer, the_split(data), examples=5) < 20


@pytest.mark.parametrize(("spans", "banned"), [([[0, 1], [1, 2]], (SEP,)), ([[0, 2], [2, 3]], ())])
def test_only_translations_of_single_sentences_must_be_one_sentence(
    data: TrainingData, monkeypatch: pytest.MonkeyPatch, spans: list[list[int]], banned: tuple[int]
) -> None:
    found = []

    def search(model: Any, sources: Sequence[list[int]], *rest: Any, banned: Any) -> Any:
        found.append((rest[0].beam, banned))
        return [Hypothesis([5], 0.0, 0.0, True) for _ in sources]

    monkeypatch.setattr(validation, "search", search)
    none = np.empty(0, dtype=np.int64)
    split = Split(the_split(data).corpus, ExampleSpans(np.array(spans), none, none))
    model = ReLUFormer(tiny().model_with(data.tokenizer.vocab_size))
    validation.dev_bleu(model, data.tokenizer, split, examples=2)
    assert found == [(1, banned)]


def test_attention_is_measured_at_every_site_without_side_effects(data: TrainingData) -> None:
    recipe = tiny(model__dropout=0.5)
    torch.manual_seed(0)
    model = ReLUFormer(recipe.model_with(data.tokenizer.vocab_size)).train()
    batches = the_split(data).batches(recipe)
    seen = [
        validation.measure_attention(model, list(batches.epoch(0))[:count], ALONE, nullcontext)
        for count in (2, 2, 1)
    ]
    assert set(seen[0]) == {"encoder", "decoder", "cross"}
    # Without dropout, two measurements agree up to the order of rows; other batches differ.
    for site, first in seen[0].items():
        assert seen[1][site] == pytest.approx(first, rel=1e-6)
        assert seen[2][site] != pytest.approx(first, rel=1e-3)
    assert model.training and all(p.grad is None for p in model.parameters())
