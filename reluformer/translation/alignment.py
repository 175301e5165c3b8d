"""Word alignment of a translation, read off the cross-attention."""

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from reluformer.translation.attention_maps import compute_cross_maps
from reluformer.translation.cancellation import check_cancelled

if TYPE_CHECKING:
    from reluformer.translation.translator import Translator

_WORD = re.compile(r"\w+|[^\w\s]")
# Maps take memory that grows with the product of the lengths.
_MOST_TOKENS = 512
# Tokens of a batch, padding included: enough to read the weights of the model rarely.
_BATCH_TOKENS = 1024


def find_words(text: str) -> list[tuple[int, int]]:
    """First and last character, the latter exclusive, of each word and punctuation mark."""
    return [match.span() for match in _WORD.finditer(text)]


def proportional_alignment(source: str, target: str) -> list[int]:
    """For each word of `target` the word of `source` at the same relative position."""
    words, count = len(find_words(source)), len(find_words(target))
    return [(2 * index + 1) * words // (2 * count) for index in range(count)]


class _Encoded(NamedTuple):
    """A sentence and its translation as tokens."""

    pair: int
    """Index of the pair."""
    ids: list[list[int]]
    """Ids of both texts."""
    places: list[list[tuple[int, int]]]
    """First and last character of each token of both texts."""

    @property
    def length(self) -> int:
        """Number of tokens of the longer text."""
        return max(map(len, self.ids))


def align_words(translator: "Translator", pairs: Sequence[tuple[str, str]]) -> list[list[int]]:
    """For each word of each translation, the index of the source word that it reads most.

    The weights of all heads and layers are averaged while the model predicts the translation.
    Long sentences, and words that read nothing, are aligned by their relative position.

    Args:
        translator: The model.
        pairs: Sentences with their translations.
    """
    tokenizer, longest = translator.tokenizer, min(translator.max_length, _MOST_TOKENS)
    aligned = [proportional_alignment(*pair) for pair in pairs]
    encoded = []
    for index, pair in enumerate(pairs):
        ids, places = zip(*map(tokenizer.encode_with_places, pair), strict=True)
        entry = _Encoded(index, [*ids], [*places])
        if aligned[index] and ids[0] and entry.length < longest:
            encoded.append(entry)
    for batch in _batches(sorted(encoded, key=lambda entry: entry.length)):
        check_cancelled()
        with torch.inference_mode():
            pairs_of_ids = [entry.ids for entry in batch]
            maps = compute_cross_maps(translator.model, tokenizer, pairs_of_ids)
        for entry, weights in zip(batch, maps, strict=True):
            best = _most_read(weights, pairs[entry.pair], entry.places)
            default = aligned[entry.pair]
            aligned[entry.pair] = [
                d if b is None else b for b, d in zip(best, default, strict=True)
            ]
    return aligned


def _batches(encoded: Sequence[_Encoded]) -> Iterator[list[_Encoded]]:
    """Batches of pairs that are sorted by their lengths."""
    batch: list[_Encoded] = []
    for entry in encoded:
        if batch and (len(batch) + 1) * entry.length > _BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(entry)
    if batch:
        yield batch


def _most_read(
    maps: Tensor, pair: tuple[str, str], places: Sequence[Sequence[tuple[int, int]]]
) -> list[int | None]:
    """For each word of a translation, the source word that it reads most; None if it reads none.

    Args:
        maps: Weights of the cross-attentions, [layers, H, T, S].
        pair: A sentence and its translation.
        places: First and last character of each token of both texts.
    """
    # Row t predicts token t + 1, so that the last row predicts the end. [T, S], end left out.
    weights = maps.float().abs().mean(dim=(0, 1))[:-1, :-1]
    by_word = _sum_rows(weights, places[1], find_words(pair[1]))
    by_word = _sum_rows(by_word.T, places[0], find_words(pair[0])).T
    best, has_read = by_word.argmax(dim=1).tolist(), (by_word.amax(dim=1) > 0).tolist()
    return [word if read else None for word, read in zip(best, has_read, strict=True)]


def _sum_rows(
    rows: Tensor, places: Sequence[tuple[int, int]], words: Sequence[tuple[int, int]]
) -> Tensor:
    """Sum of the rows of each word's tokens.

    Args:
        rows: One row for each token, [tokens, N].
        places: First and last character of each token.
        words: First and last character of each word.

    Returns:
        [words, N].
    """
    sums = rows.new_zeros(len(words), rows.shape[1])
    word = 0
    for row, (start, end) in zip(rows, places, strict=True):
        while word < len(words) and words[word][1] <= start:
            word += 1
        # A token may begin with a space and end inside the next word.
        if word < len(words) and words[word][0] < end:
            sums[word] += row
    return sums
