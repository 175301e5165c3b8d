"""Training data: generated or prepared, in either direction, by sentence or document."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from reluformer.config.recipe import Recipe, recipe_from
from reluformer.data.prepare import prepare
from reluformer.data.synthetic import sample
from reluformer.data.text import TextPair
from reluformer.errors import UserError
from reluformer.train.data import TrainingData, calibration_batches, load_data
from tests.train.tiny import tiny


def texts(data: TrainingData, example: int) -> tuple[str, str]:
    first, end = data.train.packing.spans[example].tolist()
    corpus, decode = data.train.corpus, data.tokenizer.decode
    both = (
        " ".join(decode(side.sentence(i)) for i in range(first, end))
        for side in (corpus.source, corpus.target)
    )
    source, target = both
    return source, target


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("source", ["reverse", "copy"])
def test_letters(source: str, direction: str) -> None:
    data = load_data(tiny(data__source=source, data__direction=direction))
    assert len(data.train.packing.spans) == 93
    assert data.dev is not None and len(data.dev.packing.spans) == 20
    for example in range(20):
        letters, answer = (text.split() for text in texts(data, example))
        assert answer == (letters[::-1] if source == "reverse" else letters)


def sample_recipe(**fields: object) -> Recipe:
    generated = {"train": 30, "dev": 5, "lengths": [2, 4], "vocab_size": 400}
    values = {"source": "sample", "unit": "document", "max_length": 512, **fields}
    return recipe_from({"data": {"generated": generated, **values}, "model": {}})


def test_the_sample_is_reproducible_and_has_two_directions() -> None:
    first, again = load_data(sample_recipe()), load_data(sample_recipe())
    assert first.checksums == again.checksums
    source, target = texts(first, 0)
    back = load_data(sample_recipe(direction="backward"))
    assert texts(back, 0) == (target, source)
    assert back.checksums["train"] != first.checksums["train"]


def test_unit_and_max_length_determine_the_examples() -> None:
    documents = load_data(sample_recipe())
    assert len(documents.train.packing.spans) == 30
    sentences = load_data(sample_recipe(unit="sentence"))
    assert len(sentences.train.packing.spans) == len(sentences.train.corpus)
    across = load_data(sample_recipe(cross_documents=True))
    assert len(across.train.packing.spans) < 30
    short = load_data(sample_recipe(max_length=40)).train
    spans = short.packing.spans
    assert max(short.corpus.source.lengths(spans).max(), short.corpus.target.lengths(spans).max())
    assert short.corpus.source.lengths(spans).max() <= 40


def test_mixed_lengths_cut_training_documents_only() -> None:
    whole, mixed = load_data(sample_recipe()), load_data(sample_recipe(mixed_lengths=True))
    sizes = np.diff(mixed.train.packing.spans).ravel()
    assert sizes.min() == 1 and sizes.max() > 3
    assert sizes.sum() == len(mixed.train.corpus)
    assert mixed.dev is not None and whole.dev is not None
    assert mixed.dev.packing.spans.tolist() == whole.dev.packing.spans.tolist()


def test_prepared_folders(tmp_path: Path) -> None:
    text = sample.write(tmp_path / "text", train=20, dev=4, test=4, seed=1)
    splits = {
        name: [TextPair(text / f"{name}.en", text / f"{name}.de")] for name in ("train", "dev")
    }
    prepare(tmp_path / "both", splits, vocab_size=400)
    prepare(tmp_path / "train", {"train": splits["train"]}, vocab_size=400)
    recipe = recipe_from({"data": {"source": str(tmp_path / "both")}, "model": {}})
    data = load_data(recipe)
    assert data.dev is not None and data.tokenizer.vocab_size == 400
    alone = replace(recipe, data=replace(recipe.data, source=str(tmp_path / "train")))
    with pytest.raises(UserError, match="has no dev split"):
        load_data(alone)
    assert load_data(replace(alone, train=replace(alone.train, dev_every=None))).dev is None


def test_calibration_batches_cover_all_lengths() -> None:
    recipe = tiny(data__generated__lengths=[1, 20], data__max_length=32)
    data = load_data(recipe)
    widths = [batch.target_in.shape[1] for batch in calibration_batches(recipe, data)]
    assert widths == sorted(widths)
    assert widths[0] <= 8 and widths[-1] > 16
    only = calibration_batches(tiny(calibration_batches=1), load_data(tiny()))
    assert len(only) == 1
