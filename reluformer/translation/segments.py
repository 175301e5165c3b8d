"""Cutting text to the length a model was trained for: long lines into pieces, documents into spans.

Nothing is lost: the pieces of a line with the spaces between them are the line, and every sentence
of a document is in exactly one span.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from reluformer.data.text import DOCUMENT

Encode = Callable[[Sequence[str]], list[list[int]]]
"""From texts to their tokens."""

# Training examples fit on both sides, and a translation is often a little longer than its source.
_ROOM_TO_GROW = 0.9

# Where a long line may be cut, best first: after the end of a sentence or clause, then anywhere
# between words.
_BORDERS = (re.compile(r"(?<=[.!?…。！？])\s+"), re.compile(r"(?<=[,;:])\s+"), re.compile(r"\s+"))


class Piece(NamedTuple):
    """A part of a line, and the white space between it and the next part."""

    text: str
    space: str


@dataclass(frozen=True)
class Span:
    """Parts first, first + 1, ..., end - 1."""

    first: int
    end: int

    def __len__(self) -> int:
        """Number of parts."""
        return self.end - self.first

    def halves(self) -> "tuple[Span, Span]":
        """Two spans that make up this one."""
        middle = (self.first + self.end) // 2
        return Span(self.first, middle), Span(middle, self.end)


class Layout:
    """How lines become texts for a model, and its answers lines again.

    `parts` are the sentences and the pieces of long sentences in order, `owners` the lines they
    belong to, `long` the lines that were cut. A span is what the model gets at once.
    """

    def __init__(
        self, lines: Sequence[str], limit: int, encode: Encode, *, together: bool, marks: bool
    ) -> None:
        """Cut `lines` to at most `limit` tokens, several sentences of a document `together`.

        With `marks`, lines that are `<d>` separate documents and stay as they are. Blank lines
        always do.
        """
        stripped = [line.strip() for line in lines]
        self.parts: list[Piece] = []
        self.owners: list[int] = []
        self.long: list[int] = []
        self._lines = [line if marks and line == DOCUMENT else "" for line in stripped]
        texts = [i for i, line in enumerate(stripped) if line and not self._lines[i]]
        for index, ids in zip(texts, encode([stripped[i] for i in texts]), strict=True):
            cut = [Piece(stripped[index], "")]
            if len(ids) > limit:
                cut = pieces(stripped[index], limit, encode)
            self.long += [index] * (len(cut) > 1)
            self.parts += cut
            self.owners += [index] * len(cut)
        self._ids = encode([part.text for part in self.parts])
        self._found = [""] * len(self.parts)
        self.spans = list(self._spans(int(_ROOM_TO_GROW * limit), together))

    def source(self, span: Span, separator: int) -> list[int]:
        """Tokens of the sentences of a span with separators between them."""
        ids = list(self._ids[span.first])
        for sentence in self._ids[span.first + 1 : span.end]:
            ids += [separator, *sentence]
        return ids

    def fits(self, span: Span, sentences: Sequence[str]) -> bool:
        """Whether these can be the sentences of a span: as many, none empty, none repeated."""
        different = {tuple(ids) for ids in self._ids[span.first : span.end]}
        return (
            len(sentences) == len(span)
            and all(sentence.strip() for sentence in sentences)
            and len(set(sentences)) >= len(different)
        )

    def fill(self, span: Span, sentences: Sequence[str]) -> None:
        """Put the translations of a span in their places."""
        assert len(sentences) == len(span)
        self._found[span.first : span.end] = sentences

    def translations(self) -> list[str]:
        """One line for each line; document marks as they were, blank lines empty."""
        lines = list(self._lines)
        for part, owner, text in zip(self.parts, self.owners, self._found, strict=True):
            lines[owner] += text + part.space
        return [one_line(line) for line in lines]

    def _spans(self, limit: int, together: bool) -> Iterator[Span]:
        """Whole sentences of a document as they fit; pieces of a long sentence one by one."""
        cut = set(self.long)

        def continues(index: int) -> bool:
            before, here = self.owners[index - 1], self.owners[index]
            return together and here == before + 1 and not {before, here} & cut

        starts = [i for i in range(len(self.parts)) if i == 0 or not continues(i)]
        for start, end in pairwise([*starts, len(self.parts)]):
            for span in pack([len(ids) for ids in self._ids[start:end]], limit):
                yield Span(start + span.first, start + span.end)


def one_line(text: str) -> str:
    """`text` without anything that some program takes for the end of a line."""
    return " ".join(text.splitlines())


def pieces(text: str, limit: int, encode: Encode) -> list[Piece]:
    """Cut a text of more than `limit` tokens into pieces that fit, as few and natural as possible.

    A single character may still be longer.
    """
    return _pieces(Piece(text, ""), limit, encode, _BORDERS)


def _pieces(
    whole: Piece, limit: int, encode: Encode, borders: tuple[re.Pattern[str], ...]
) -> list[Piece]:
    """Cut a piece that is too long at borders of the first kind; longer parts at others."""
    if len(whole.text) <= 1:
        return [whole]
    if borders:
        parts = list(_cut(whole, borders[0]))
    else:
        middle = len(whole.text) // 2
        parts = [Piece(whole.text[:middle], ""), Piece(whole.text[middle:], whole.space)]
    fine: list[Piece] = []
    for part, ids in zip(parts, encode([part.text for part in parts]), strict=True):
        fine += [part] if len(ids) <= limit else _pieces(part, limit, encode, borders[1:])
    return _join(fine, limit, encode)


def _cut(whole: Piece, border: re.Pattern[str]) -> Iterator[Piece]:
    start = 0
    for match in border.finditer(whole.text):
        if match.start() > start:
            yield Piece(whole.text[start : match.start()], match.group())
            start = match.end()
    yield Piece(whole.text[start:], whole.space)


def _join(parts: list[Piece], limit: int, encode: Encode) -> list[Piece]:
    """Join neighbours while they fit together."""
    alone = encode([part.text for part in parts])
    # A word may have other tokens after a space than at the start of a text.
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
    """Spans of as many sentences as fit into `limit`; one that does not fit stands alone.

    `lengths` are tokens of the sentences; a separator stands between two of them.
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
