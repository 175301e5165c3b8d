"""The sample that ships with the package: an endless English-German task written by us.

Numbers, dates, clock times and prices, in short sentences and in documents whose sentences depend
on earlier ones. Every meaning has one wording in each language, so a translation is right or
wrong. Everything is a function of the seed. The two toy tasks, copying and reversing letters, are
here too.
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

# Sentences are dealt to the splits by a checksum of the English: no two splits share one.
_SHARES = 16
_HELD_OUT: dict[int, Split] = {0: "test", 1: "dev"}


def split_of(english: str) -> Split:
    """The split a generated sentence belongs to."""
    return _HELD_OUT.get(zlib.crc32(english.encode()) % _SHARES, "train")


def sentences(seed: int, count: int, *, split: Split | None = None) -> Iterator[Pair]:
    """Yield `count` (English, German) pairs that can be translated one by one.

    With `split`, only sentences that belong to it, so different splits never share one.
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
    """Yield `count` documents, each a list of (English, German) pairs that belong together.

    `sentences` bounds their number, both ends included. With `split`, every sentence belongs to it.
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
    """Write `train`, `dev` and `test` documents (or sentences) as aligned text files.

    Gives `train.en`, `train.de` and so on in `folder`; a line `<d>` starts each document. No
    sentence of one split occurs in another. Returns `folder`.
    """
    folder = Path(folder)
    counts: dict[Split, int] = {"train": train, "dev": dev, "test": test}
    for split, count in counts.items():
        if count < 1:
            raise UserError(f"{split} is {count}, but a split needs at least one document")
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
    """Yield `count` pairs of `symbols` different letters: "c a b" and its reverse "b a c"."""
    for letters in _letters(seed, count, symbols, length_range):
        yield " ".join(letters), " ".join(reversed(letters))


def copy_pairs(
    seed: int, count: int, symbols: int = 10, length_range: tuple[int, int] = (1, 10)
) -> Iterator[Pair]:
    """Yield `count` pairs of `symbols` different letters whose target equals the source."""
    for letters in _letters(seed, count, symbols, length_range):
        yield " ".join(letters), " ".join(letters)


def _belongs(pair: Pair, split: Split | None) -> bool:
    # Every pattern has far more wordings than there are shares, so redrawing ends soon.
    return split is None or split_of(pair[0]) == split


def _documents(seed: int, count: int, split: Split, several: bool) -> Iterator[list[Pair]]:
    if several:
        return documents(seed, count, split=split)
    return ([pair] for pair in sentences(seed, count, split=split))


def _letters(
    seed: int, count: int, symbols: int, length_range: tuple[int, int]
) -> Iterator[list[str]]:
    if not 1 <= symbols <= len(ascii_lowercase):
        raise UserError(f"symbols is {symbols}, allowed are 1 to {len(ascii_lowercase)}")
    _check_range("length_range", length_range)
    rng = Random(f"letters {seed} {symbols} {length_range}")
    for _ in range(count):
        yield rng.choices(ascii_lowercase[:symbols], k=rng.randint(*length_range))


def _check_range(name: str, bounds: tuple[int, int]) -> None:
    if not 1 <= bounds[0] <= bounds[1]:
        raise UserError(f"{name} is {tuple(bounds)}, allowed is (low, high) with 1 <= low <= high")
