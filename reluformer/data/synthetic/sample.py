"""Generated tasks: an English-German sample, and copying or reversing letters.

The sample has numbers, dates, clock times and prices, in single sentences and in documents whose
sentences depend on earlier ones. Every meaning has one wording in each language, so a translation
is either right or wrong. All tasks are unlimited in size and determined by the seed.
"""

import zlib
from collections.abc import Iterator
from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import Literal

from reluformer.data.synthetic.phrases import Pair
from reluformer.data.synthetic.sentences import STANDALONE
from reluformer.data.synthetic.stories import continuation, opening
from reluformer.data.text import write_documents
from reluformer.errors import UserError

Split = Literal["train", "dev", "test"]

# A checksum of the English text assigns a sentence to a split, so splits share no sentence.
_SHARES = 16
_HELD_OUT: dict[int, Split] = {0: "test", 1: "dev"}


def split_of(english: str) -> Split:
    """Split that a generated sentence belongs to."""
    return _HELD_OUT.get(zlib.crc32(english.encode()) % _SHARES, "train")


def sentences(seed: int, count: int, *, split: Split | None = None) -> Iterator[Pair]:
    """Yield `count` (English, German) sentence pairs, independent of each other.

    With `split`, all sentences belong to that split; different splits share no sentence.
    """
    rng = Random(f"sentences {seed} {split}")
    for _ in range(count):
        pattern = rng.choice(STANDALONE)
        pair = pattern(rng)
        while not _belongs(pair, split):
            pair = pattern(rng)
        yield pair


def documents(
    seed: int, count: int, sentences: tuple[int, int] = (3, 12), *, split: Split | None = None
) -> Iterator[list[Pair]]:
    """Yield `count` documents, each a list of (English, German) sentence pairs.

    `sentences` are the smallest and largest number of sentences of a document. With `split`, all
    sentences belong to that split.
    """
    _check_range("sentences", sentences)
    rng = Random(f"documents {seed} {split}")
    for _ in range(count):
        length = rng.randint(*sentences)
        pair, story = opening(rng)
        while not _belongs(pair, split):
            pair, story = opening(rng)
        document = [pair]
        while len(document) < length:
            pair, following = continuation(story, rng)
            while not _belongs(pair, split):
                pair, following = continuation(story, rng)
            story = following
            document.append(pair)
        yield document


def write(
    folder: Path | str, *, train: int, dev: int, test: int, seed: int, documents: bool = True
) -> Path:
    """Write aligned text files `train.en`, `train.de`, `dev.en`, ... and return `folder`.

    Args:
        folder: Folder to write to.
        train: Number of training documents, or sentences.
        dev: Number of validation documents, or sentences.
        test: Number of test documents, or sentences.
        seed: Seed of the text. Splits share no sentence.
        documents: Write documents, each after a `<d>` line, instead of single sentences.
    """
    folder = Path(folder)
    counts: dict[Split, int] = {"train": train, "dev": dev, "test": test}
    for split, count in counts.items():
        if count < 1:
            raise UserError(f"{split} must be at least 1, got {count}")
        write_documents(
            folder / f"{split}.en",
            folder / f"{split}.de",
            _documents(seed, count, split, documents),
            marked=documents,
        )
    return folder


def reverse_pairs(
    seed: int, count: int, symbols: int = 10, length_range: tuple[int, int] = (1, 10)
) -> Iterator[Pair]:
    """Yield `count` pairs such as ("c a b", "b a c"), of the first `symbols` letters."""
    for letters in _letters(seed, count, symbols, length_range):
        yield " ".join(letters), " ".join(reversed(letters))


def copy_pairs(
    seed: int, count: int, symbols: int = 10, length_range: tuple[int, int] = (1, 10)
) -> Iterator[Pair]:
    """Yield `count` pairs such as ("c a b", "c a b"), of the first `symbols` letters."""
    for letters in _letters(seed, count, symbols, length_range):
        yield " ".join(letters), " ".join(letters)


def _belongs(pair: Pair, split: Split | None) -> bool:
    # Every pattern has far more wordings than `_SHARES`, so few redraws are needed.
    return split is None or split_of(pair[0]) == split


def _documents(seed: int, count: int, split: Split, several: bool) -> Iterator[list[Pair]]:
    if several:
        return documents(seed, count, split=split)
    return ([pair] for pair in sentences(seed, count, split=split))


def _letters(
    seed: int, count: int, symbols: int, length_range: tuple[int, int]
) -> Iterator[list[str]]:
    if not 1 <= symbols <= len(ascii_lowercase):
        raise UserError(f"symbols must be from 1 to {len(ascii_lowercase)}, got {symbols}")
    _check_range("length_range", length_range)
    rng = Random(f"letters {seed} {symbols} {length_range}")
    for _ in range(count):
        yield rng.choices(ascii_lowercase[:symbols], k=rng.randint(*length_range))


def _check_range(name: str, bounds: tuple[int, int]) -> None:
    if not 1 <= bounds[0] <= bounds[1]:
        raise UserError(f"{name} must be (low, high) with 1 <= low <= high, got {tuple(bounds)}")
