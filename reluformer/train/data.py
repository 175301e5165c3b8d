"""Data of a recipe: tokenizer, training examples and dev examples."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from reluformer.config.data import GENERATED, DataConfig
from reluformer.config.recipe import Recipe
from reluformer.data.batches import Batch, Batches
from reluformer.data.corpus import Corpus
from reluformer.data.packing import ExampleSpans, mixed_limits, pack_sentences, single_sentences
from reluformer.data.prepare import Prepared
from reluformer.data.synthetic import sample
from reluformer.data.tokenizer import Tokenizer
from reluformer.errors import UserError

_CALIBRATION_TOKENS = 4096

Documents = Iterable[Sequence[tuple[str, str]]]


@dataclass(frozen=True)
class Split:
    """A corpus and its division into examples."""

    corpus: Corpus
    packing: ExampleSpans

    def batches(self, recipe: Recipe, *, fixed_shapes: bool = False) -> Batches:
        """Batches of the examples, with the recipe's size and seed.

        Args:
            recipe: Settings of the run.
            fixed_shapes: Fill batches up to few shapes, for compilation and CUDA graphs.
        """
        return Batches(
            self.corpus,
            self.packing.spans,
            batch_tokens=recipe.train.batch_tokens,
            seed=recipe.train.seed,
            fixed_shapes=fixed_shapes,
        )


@dataclass(frozen=True)
class TrainingData:
    """Data of a run, with checksums that identify it."""

    tokenizer: Tokenizer
    train: Split
    dev: Split | None
    checksums: dict[str, str]

    def describe(self) -> dict[str, str]:
        """Number of examples of each split, and of the sentences that are left out."""
        splits = {"train": self.train, "dev": self.dev}
        return {name: split.packing.describe() for name, split in splits.items() if split}


def load_data(recipe: Recipe) -> TrainingData:
    """Generate or open the data of a recipe.

    Raises:
        UserError: A split is missing, or no sentence fits `data.max_length`.
    """
    config = recipe.data
    if config.source in GENERATED:
        tokenizer, corpora = _generate(config)
    else:
        prepared = Prepared.open(config.source)
        tokenizer = prepared.tokenizer()
        corpora = {
            split: prepared.corpus(split) for split in ("train", "dev") if split in prepared.splits
        }
    if "dev" not in corpora and (recipe.train.dev_every or recipe.train.bleu_every):
        raise UserError(
            f"data.source {config.source} has no dev split, which train.dev_every and "
            "train.bleu_every need; set both to null"
        )
    if config.direction == "backward":
        corpora = {name: _swapped(corpus) for name, corpus in corpora.items()}
    checksums = {"tokenizer": tokenizer.sha256}
    checksums.update({name: _checksum(corpus) for name, corpus in corpora.items()})
    splits = {name: Split(corpus, _cut(config, name, corpus)) for name, corpus in corpora.items()}
    return TrainingData(tokenizer, splits["train"], splits.get("dev"), checksums)


def calibration_batches(recipe: Recipe, data: TrainingData) -> list[Batch]:
    """Small batches of all lengths, from the shortest bucket to the longest.

    The batches are the same in every process.
    """
    split = data.train
    whole = split.batches(recipe)
    small = Batches(
        split.corpus,
        split.packing.spans,
        batch_tokens=min(recipe.train.batch_tokens, max(_CALIBRATION_TOKENS, whole.buckets[-1])),
        seed=recipe.train.seed,
        buckets=whole.buckets.tolist(),
    )
    plan = small.plan(0)
    used = np.unique(plan.buckets)
    count = min(recipe.train.calibration_batches, len(used))
    chosen = used[np.linspace(0, len(used) - 1, count).round().astype(int)]
    indices = [int(np.flatnonzero(plan.buckets == bucket)[0]) for bucket in chosen]
    return [small.batch(plan, index) for index in indices]


def _generate(config: DataConfig) -> tuple[Tokenizer, dict[str, Corpus]]:
    generated = config.generated
    assert generated is not None
    bounds = (generated.lengths[0], generated.lengths[1])

    def documents(split: sample.Split, count: int) -> Documents:
        if config.source == "sample":
            return sample.documents(generated.seed, count, bounds, split=split)
        pairs = sample.reverse_pairs if config.source == "reverse" else sample.copy_pairs
        # The two splits have different seeds; short sequences may occur in both.
        seed = 2 * generated.seed + (split == "dev")
        return ([pair] for pair in pairs(seed, count, generated.symbols, bounds))

    train = list(documents("train", generated.train))
    lines = [side for document in train for pair in document for side in pair]
    tokenizer = Tokenizer.train(lines, generated.vocab_size)
    return tokenizer, {
        "train": Corpus.in_memory(train, tokenizer),
        "dev": Corpus.in_memory(documents("dev", generated.dev), tokenizer),
    }


def _swapped(corpus: Corpus) -> Corpus:
    return replace(corpus, source=corpus.target, target=corpus.source)


def _cut(config: DataConfig, split: str, corpus: Corpus) -> ExampleSpans:
    if config.unit == "sentence":
        packing = single_sentences(corpus, config.max_length)
    else:
        limit, limits = config.max_length, None
        if config.mixed_lengths and split == "train":
            limits = mixed_limits(len(corpus.documents) - 1, limit)
        packing = pack_sentences(
            corpus, limit, cap=limit, cross_documents=config.cross_documents, limits=limits
        )
    if not len(packing.spans):
        raise UserError(
            f"data.max_length must fit a sentence of {config.source}, got {config.max_length}, "
            f"less than every sentence of {split} needs"
        )
    return packing


def _checksum(corpus: Corpus) -> str:
    digest = hashlib.sha256()
    arrays: list[Any] = [corpus.documents]
    for side in (corpus.source, corpus.target):
        arrays += [side.tokens, side.offsets]
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
