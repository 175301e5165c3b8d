"""Word alignment of a translation, read off the cross-attention."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from reluformer.translation.attention_maps import compute_maps

if TYPE_CHECKING:
    from reluformer.translation.translator import Translator

_WORD = re.compile(r"\w+|[^\w\s]")
# Maps take memory that grows with the product of the lengths.
_MOST_TOKENS = 512


def find_words(text: str) -> list[tuple[int, int]]:
    """First and last character, the latter exclusive, of each word and punctuation mark."""
    return [match.span() for match in _WORD.finditer(text)]


def proportional_alignment(source: str, target: str) -> list[int]:
    """For each word of `target` the word of `source` at the same relative position."""
    words, count = len(find_words(source)), len(find_words(target))
    return [(2 * index + 1) * words // (2 * count) for index in range(count)]


def align_words(translator: "Translator", source: str, target: str) -> list[int]:
    """For each word of a translation, the index of the source word that it reads most.

    The weights of all heads and layers are averaged while the model predicts the translation.
    Long sentences, and words that read nothing, are aligned by their relative position.

    Args:
        translator: The model.
        source: A sentence.
        target: Its translation.
    """
    default = proportional_alignment(source, target)
    tokenizer, longest = translator.tokenizer, min(translator.max_length, _MOST_TOKENS)
    source_ids, source_places = tokenizer.encode_with_places(source)
    target_ids, target_places = tokenizer.encode_with_places(target)
    if not default or max(len(source_ids), len(target_ids)) >= longest or not source_ids:
        return default
    with torch.inference_mode():
        maps = compute_maps(translator.model, tokenizer, source_ids, target_ids)
    # Row t predicts token t + 1, so that the last row predicts the end. [T, S], end left out.
    weights = maps.cross.float().abs().mean(dim=(0, 1))[:-1, :-1]
    by_word = _sum_rows(weights, target_places, find_words(target))
    by_word = _sum_rows(by_word.T, source_places, find_words(source)).T
    best = by_word.argmax(dim=1).tolist()
    has_read = (by_word.amax(dim=1) > 0).tolist()
    return [b if read else d for b, read, d in zip(best, has_read, default, strict=True)]


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
