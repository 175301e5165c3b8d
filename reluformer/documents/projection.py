"""Inline markup put around the words of a translation that correspond to the original ones."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import NamedTuple

from reluformer.documents.passage import Mark, Passage
from reluformer.translation.alignment import find_words
from reluformer.translation.cancellation import check_cancelled

# White space inside markup is no place for a line break. Unicode reserves these code points for
# internal use, so that they do not occur in documents.
HIDDEN_SPACE = "\ufdd0"
_HIDDEN = {" ": HIDDEN_SPACE, "\t": "\ufdd1", "\n": "\ufdd2", "\r": "\ufdd3"}
_HIDE = str.maketrans(_HIDDEN)
_SHOW = str.maketrans({hidden: shown for shown, hidden in _HIDDEN.items()})
# Words inside an element that may be aligned elsewhere: articles, for example.
_GAP = 1
# Punctuation that has no space behind it, and punctuation that has none before it.
_OPENING, _CLOSING = "([{«„‚“‘\"'", ")]}»“”‘’\"'.,;:!?…"


class _Placed(NamedTuple):
    """A mark around the words [first, end) of a translation."""

    mark: Mark
    inner: "list[_Placed]"
    first: int
    end: int


def project(passage: Passage, translation: str, alignment: Sequence[int]) -> str:
    """Write a translation in the passage's format, with every mark of the passage.

    Args:
        passage: The original.
        translation: Plain text.
        alignment: For each word of the translation (`find_words`) the index of the word of the
            original that it translates.

    Returns:
        All text and all markup. Content that is never translated replaces its translation.
    """
    if not passage.marks:
        return passage.lay_out(passage.escape(translation))
    writer = _Writer(passage, translation, alignment)
    return passage.lay_out(writer.write()).translate(_SHOW)


class _Writer:
    def __init__(self, passage: Passage, translation: str, alignment: Sequence[int]) -> None:
        self.passage, self.target = passage, translation
        self.source_words: list[tuple[int, int]] = []
        self.words: list[tuple[int, int]] = []
        self.alignment: list[int] = []
        self._split_words(alignment)
        self._starts, self._stops = ([word[side] for word in self.source_words] for side in (0, 1))
        self._readers: list[list[int]] = [[] for _ in self.source_words]
        """Words of the translation that are aligned with each word of the original."""
        for word, read in enumerate(self.alignment):
            self._readers[read].append(word)
        self._used: set[int] = set()

    def _split_words(self, alignment: Sequence[int]) -> None:
        """Split words at marks inside of them, and copies of these words in the translation."""
        source, target = self.passage.text, self.target
        cuts = sorted({place for mark in self.passage.marks for place in (mark.start, mark.end)})
        words, pieces = find_words(source), []
        for start, end in words:
            inside = cuts[bisect_right(cuts, start) : bisect_left(cuts, end)]
            pieces.append((len(self.source_words), list(pairwise([start, *inside, end]))))
            self.source_words += pieces[-1][1]
        for (start, end), word in zip(find_words(target), alignment, strict=True):
            first, parts = pieces[word]
            low, high = words[word]
            if target[start:end] == source[low:high]:
                self.words += [(start + a - low, start + b - low) for a, b in parts]
                self.alignment += range(first, first + len(parts))
            else:
                self.words.append((start, end))
                self.alignment.append(first)

    def write(self) -> str:
        """The translation with all marks."""
        placed = self._place(list(self.passage.marks), 0, len(self.words))
        return self._text(placed, 0, len(self.target))

    def _place(self, marks: list[Mark], first: int, end: int) -> list[_Placed]:
        """Find places for marks inside the words [first, end); places do not overlap."""
        wanted = []
        while marks:
            mark, *rest = marks
            wanted.append((self._range(mark, first, end), mark, rest[: mark.inner]))
            marks = rest[mark.inner :]
        wanted.sort(key=lambda item: item[0])
        placed = []
        for (low, high), mark, inner in wanted:
            low = max(low, first)
            # An element that had words keeps at least one, if one is left.
            has_words = not mark.is_verbatim and self.passage.text[mark.start : mark.end].strip()
            high = max(low, high, min(low + bool(has_words), end))
            placed.append(_Placed(mark, self._place(inner, low, high), low, high))
            first = high
        return placed

    def _range(self, mark: Mark, first: int, end: int) -> tuple[int, int]:
        """Words of the translation that a mark belongs around."""
        # A hostile document has thousands of marks.
        check_cancelled()
        if mark.is_verbatim and (copied := self._copied(mark, first, end)):
            return copied
        covered = bisect_right(self._stops, mark.start), bisect_left(self._starts, mark.end)
        readers = chain.from_iterable(self._readers[slice(*covered)])
        inside = sorted(word for word in readers if first <= word < end)
        if inside and mark.is_verbatim:
            return _longest_run(inside, 0)
        if inside:
            return self._trimmed(mark, *_longest_run(inside, _GAP), range(first, end))
        place = self._empty_place(mark, first, end)
        return place, place

    def _trimmed(self, mark: Mark, first: int, end: int, words: range) -> tuple[int, int]:
        """The range without punctuation at its ends, if the original has none there.

        Markdown does not read `*` between a letter and a full stop as an opening. If nothing is
        left, the range is the nearest of `words`.
        """
        content = self.passage.text[mark.start : mark.end].strip()
        if not content[:1].isalnum() and not content[-1:].isalnum():
            return first, end
        inside = [word for word in range(first, end) if self._is_word(word)]
        if not inside:
            others = filter(self._is_word, words)
            nearest = min(others, key=lambda word: abs(word - first), default=first)
            return nearest, nearest + 1
        low = inside[0] if content[:1].isalnum() else first
        return low, inside[-1] + 1 if content[-1:].isalnum() else end

    def _is_word(self, word: int) -> bool:
        """Whether this is a word of the translation, and no punctuation mark."""
        return self.target[self.words[word][0]].isalnum()

    def _empty_place(self, mark: Mark, first: int, end: int) -> int:
        """Place of a mark without words: behind the translation of the word before it."""
        before = bisect_right(self._stops, mark.start)
        if not before:
            return first
        following = [word + 1 for word in self._readers[before - 1] if first <= word < end]
        if following:
            return following[-1]
        share = before / len(self.source_words)
        return min(max(round(share * len(self.words)), first), end)

    def _copied(self, mark: Mark, first: int, end: int) -> tuple[int, int] | None:
        """Words [first, end) that the model has copied from a verbatim mark, nearest to its place.

        A copy belongs to one mark only.
        """
        visible = self.passage.text[mark.start : mark.end]
        if not visible:
            return None
        place = mark.start * len(self.target) / len(self.passage.text)
        copies = [
            copy.start()
            for copy in re.finditer(re.escape(visible), self.target, re.IGNORECASE)
            if copy.start() not in self._used
        ]
        for start in sorted(copies, key=lambda start: abs(start - place)):
            stop = start + len(visible)
            inside = [
                word
                for word in range(first, end)
                if start <= self.words[word][0] and self.words[word][1] <= stop
            ]
            if inside:
                self._used.add(start)
                return inside[0], inside[-1] + 1
        return None

    def _text(self, placed: list[_Placed], first: int, end: int, *, is_inner: bool = False) -> str:
        """Characters [first, end) of the translation with marks.

        `is_inner` says that they are in an element, which neither begins nor ends with a space.
        """
        written, escape, start = list[str](), self.passage.escape, first
        before: Mark | None = None
        for mark, inner, first_word, end_word in placed:
            has_words = first_word < end_word
            low = min(max(self._start(mark, first_word, has_words), start), end)
            high = self.words[end_word - 1][1] if has_words else low
            written.append(escape(self.target[start:low]))
            opening, closing = mark.opening.translate(_HIDE), mark.closing.translate(_HIDE)
            inside = "" if mark.is_verbatim else self._text(inner, low, high, is_inner=True)
            left, right = False, False
            if mark.is_verbatim or not has_words:
                left, right = self._needed_spaces(mark, low, high)
                # Two pieces of code that came together would be read as one.
                if before is not None and before.is_verbatim and low == start:
                    left = before.end != mark.start
                left = left and not (is_inner and low == first) and not _ends_with_space(written)
                right = (
                    right
                    and not (is_inner and high == end)
                    and not (opening + closing).endswith(HIDDEN_SPACE)
                )
            # Delimiters such as "**" around nothing would be other markup.
            if inside or opening != closing:
                written += [" " * left, opening, inside, closing, " " * right]
            start, before = high, mark
        return "".join([*written, escape(self.target[start:end])])

    def _needed_spaces(self, mark: Mark, low: int, high: int) -> tuple[bool, bool]:
        """Whether kept content at characters [low, high) needs a space before it, and behind it."""
        text, target = self.passage.text, self.target
        before = text[max(mark.start - 1, 0) : mark.start], target[max(low - 1, 0) : low]
        behind = text[mark.end : mark.end + 1], target[high : high + 1]
        return _needs_space(*before, _OPENING), _needs_space(*behind, _CLOSING)

    def _start(self, mark: Mark, first: int, has_words: bool) -> int:
        """Character before which a mark is written that is placed before the word `first`."""
        is_attached = mark.start > 0 and not self.passage.text[mark.start - 1].isspace()
        if first > 0 and not has_words and is_attached:
            return self.words[first - 1][1]
        return self.words[first][0] if first < len(self.words) else len(self.target)


def _needs_space(original: str, here: str, tight: str) -> bool:
    """Whether kept content needs a space on one side.

    Args:
        original: The character on that side in the original, or "" at its start or end.
        here: The character on that side in the translation, or "".
        tight: Punctuation that has no space on that side.
    """
    if not here or here.isspace():
        return False
    # In the original, the content may touch a word, as in `x`s.
    return not original.isalnum() if here.isalnum() else not (original.strip() or here in tight)


def _ends_with_space(pieces: list[str]) -> bool:
    last = next((piece for piece in reversed(pieces) if piece), "")
    return last.endswith((" ", HIDDEN_SPACE))


def _longest_run(words: list[int], gap: int) -> tuple[int, int]:
    """Longest range [first, end) of sorted indices with at most `gap` missing between two."""
    best = run = (words[0], words[0] + 1)
    for word in words[1:]:
        run = (run[0], word + 1) if word - run[1] <= gap else (word, word + 1)
        best = max(best, run, key=lambda r: r[1] - r[0])
    return best
