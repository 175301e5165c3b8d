"""Segmentation of text to the trained length: long lines into pieces, documents into spans.

No text is lost: the pieces of a line and the white space between them concatenate to the line, and
every sentence of a document is in exactly one span.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from reluformer.data.text import DOCUMENT

Encode = Callable[[Sequence[str]], list[list[int]]]
"""A function from texts to the token ids of each."""

# Share of the limit that a span may fill. Source and target of a training example both fit the
# limit, and a translation is often a little longer than its source.
_SOURCE_SHARE = 0.9

# Where a long line may be split, in order of preference: after a sentence, after a clause, between
# words.
_BORDERS = (re.compile(r"(?<=[.!?…。！？])\s+"), re.compile(r"(?<=[,;:])\s+"), re.compile(r"\s+"))


class Piece(NamedTuple):
    """A part of a line."""

    text: str
    space: str
    """White space between this piece and the next."""


@dataclass(frozen=True)
class Span:
    """Consecutive pieces: first, first + 1, ..., end - 1."""

    first: int
    end: int

    def __len__(self) -> int:
        """Number of pieces."""
        return self.end - self.first

    def halves(self) -> "tuple[Span, Span]":
        """The two halves of this span."""
        middle = (self.first + self.end) // 2
        return Span(self.first, middle), Span(middle, self.end)


class SegmentedLines:
    """Lines divided into spans for a model, and the translations put together again.

    Attributes:
        pieces: Sentences, and the pieces of long sentences, in order.
        owners: Index of the line that each piece belongs to.
        long: Indices of the lines that were split.
        spans: Pieces that the model translates at once.
    """

    def __init__(
        self, lines: Sequence[str], limit: int, encode: Encode, *, together: bool, marks: bool
    ) -> None:
        """Divide lines into spans.

        Args:
            lines: Text without line ends.
            limit: Most tokens of a span.
            encode: Tokenizes texts.
            together: Put several sentences of a document into one span.
            marks: `<d>` lines separate documents and are kept. Blank lines always are.
        """
        stripped = [line.strip() for line in lines]
        self.pieces: list[Piece] = []
        self.owners: list[int] = []
        self.long: list[int] = []
        self._lines = [line if marks and line == DOCUMENT else "" for line in stripped]
        texts = [i for i, line in enumerate(stripped) if line and not self._lines[i]]
        for index, ids in zip(texts, encode([stripped[i] for i in texts]), strict=True):
            line_pieces = [Piece(stripped[index], "")]
            if len(ids) > limit:
                line_pieces = split_line(stripped[index], limit, encode)
            self.long += [index] * (len(line_pieces) > 1)
            self.pieces += line_pieces
            self.owners += [index] * len(line_pieces)
        self._ids = encode([piece.text for piece in self.pieces])
        self._translations = [""] * len(self.pieces)
        self.spans = list(self._spans(int(_SOURCE_SHARE * limit), together))

    def source(self, span: Span, separator: int) -> list[int]:
        """Token ids of a span, with `separator` between sentences."""
        ids = list(self._ids[span.first])
        for sentence in self._ids[span.first + 1 : span.end]:
            ids += [separator, *sentence]
        return ids

    def fits(self, span: Span, sentences: Sequence[str]) -> bool:
        """Whether `sentences` can be the translation of a span.

        There must be one for each piece, none may be empty, and different pieces must have
        different translations.
        """
        different = {tuple(ids) for ids in self._ids[span.first : span.end]}
        return (
            len(sentences) == len(span)
            and all(sentence.strip() for sentence in sentences)
            and len(set(sentences)) >= len(different)
        )

    def fill(self, span: Span, sentences: Sequence[str]) -> None:
        """Store the translations of a span's pieces."""
        assert len(sentences) == len(span)
        self._translations[span.first : span.end] = sentences

    def translations(self) -> list[str]:
        """Translated lines; `<d>` lines are kept, blank lines are empty."""
        lines = list(self._lines)
        for piece, owner, text in zip(self.pieces, self.owners, self._translations, strict=True):
            lines[owner] += text + piece.space
        return [one_line(line) for line in lines]

    def _spans(self, limit: int, together: bool) -> Iterator[Span]:
        """Yield spans of whole sentences that fit; every piece of a long sentence stands alone."""
        split = set(self.long)

        def continues(index: int) -> bool:
            before, here = self.owners[index - 1], self.owners[index]
            return together and here == before + 1 and not {before, here} & split

        starts = [i for i in range(len(self.pieces)) if i == 0 or not continues(i)]
        for start, end in pairwise([*starts, len(self.pieces)]):
            for span in pack([len(ids) for ids in self._ids[start:end]], limit):
                yield Span(start + span.first, start + span.end)


def one_line(text: str) -> str:
    """Replace every character sequence that ends a line, also Unicode's, by a space."""
    return " ".join(text.splitlines())


def split_line(text: str, limit: int, encode: Encode) -> list[Piece]:
    """Split a text of more than `limit` tokens into few pieces that fit, at natural places.

    Only a piece of a single character may exceed the limit.
    """
    return _split(Piece(text, ""), limit, encode, _BORDERS)


def _split(
    whole: Piece, limit: int, encode: Encode, borders: tuple[re.Pattern[str], ...]
) -> list[Piece]:
    """Split at borders of the first kind, and parts that are still too long at the next kinds."""
    if len(whole.text) <= 1:
        return [whole]
    if borders:
        parts = list(_split_at(whole, borders[0]))
    else:
        middle = len(whole.text) // 2
        parts = [Piece(whole.text[:middle], ""), Piece(whole.text[middle:], whole.space)]
    fine: list[Piece] = []
    for part, ids in zip(parts, encode([part.text for part in parts]), strict=True):
        fine += [part] if len(ids) <= limit else _split(part, limit, encode, borders[1:])
    return _join(fine, limit, encode)


def _split_at(whole: Piece, border: re.Pattern[str]) -> Iterator[Piece]:
    start = 0
    for match in border.finditer(whole.text):
        if match.start() > start:
            yield Piece(whole.text[start : match.start()], match.group())
            start = match.end()
    yield Piece(whole.text[start:], whole.space)


def _join(parts: list[Piece], limit: int, encode: Encode) -> list[Piece]:
    """Join consecutive pieces while they fit into `limit`."""
    alone = encode([part.text for part in parts])
    # A word may be tokenised differently after a space than at the start of a text.
    inside = encode([before.space + part.text for before, part in pairwise(parts)])
    joined, total = [parts[0]], len(alone[0])
    for part, first, following in zip(parts[1:], alone[1:], inside, strict=True):
        if total + len(following) <= limit:
            text, space = joined.pop()
            joined.append(Piece(f"{text}{space}{part.text}", part.space))
            total += len(following)
        else:
            joined.append(part)
            total = len(first)
    return joined


def pack(lengths: Sequence[int], limit: int) -> list[Span]:
    """Pack consecutive sentences greedily into spans of at most `limit` tokens.

    Args:
        lengths: Number of tokens of each sentence. A separator token stands between sentences.
        limit: Most tokens of a span; a longer sentence has a span of its own.
    """
    spans: list[Span] = []
    total = 0
    for index, length in enumerate(lengths):
        if spans and total + 1 + length <= limit:
            spans[-1] = Span(spans[-1].first, index + 1)
            total += 1 + length
        else:
            spans.append(Span(index, index + 1))
            total = length
    return spans
