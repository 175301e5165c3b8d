"""Building of passages from text and inline markup in the order of the document."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

from reluformer.documents.passage import Mark, Part, Passage

_SPACES = re.compile(r"\s+")
# Addresses and pictures are kept as they are. A full stop, a bracket or a reference of HTML at the
# end of an address belongs to the sentence. Models know few pictures, so that none reads them.
_KEPT = re.compile(
    r"(?P<address>\b(?:https?://|www\.)(?:(?!&(?!amp;)#?\w{1,32};)[^\s<>()\[\]\"])+(?<![.,;:!?'*_])"
    r"|\b[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,8})"
    # Arrows, technical signs, dingbats, emoji; then variants, joiners and tags of flags; keycaps.
    "|(?:[\u2190-\u21ff\u2300-\u23ff\u2600-\u27bf\u2b00-\u2bff\U0001f000-\U0001faff]"
    "[\u200d\ufe0f\U000e0020-\U000e007f]*)+|[0-9#*]\ufe0f?\u20e3"
)


# Elements inside each other; no document needs more.
_DEEPEST = 64


class _Event(NamedTuple):
    kind: Literal["text", "verbatim", "open", "close"]
    literal: str
    """Characters of the document."""
    visible: str = ""
    """Plain text of `literal`."""
    name: str = ""
    """Name that an opening and its closing share."""


class Builder:
    """Collects the inline content of one block and returns its parts.

    Markup that is not closed in the block, or not opened, is kept as it is and separates passages.
    """

    def __init__(
        self,
        escape: Callable[[str], str] | None = None,
        lay_out: Callable[[str], str] | None = None,
    ) -> None:
        """Start a block; `escape` and `lay_out` are those of its passages."""
        self._settings = {
            name: function
            for name, function in (("escape", escape), ("lay_out", lay_out))
            if function is not None
        }
        self._events: list[_Event] = []

    def text(self, literal: str, read: Callable[[str], str] = str) -> None:
        """Add text; `read` turns a part of it into plain text."""
        end = 0
        for match in _KEPT.finditer(literal):
            if match.start() > end:
                between = literal[end : match.start()]
                self._events.append(_Event("text", between, read(between)))
            self.verbatim(match.group(), read(match["address"] or ""))
            end = match.end()
        if end < len(literal):
            self._events.append(_Event("text", literal[end:], read(literal[end:])))

    def character(self, literal: str, visible: str) -> None:
        """Add a character that the format writes differently."""
        self._events.append(_Event("text", literal, visible))

    def verbatim(self, literal: str, visible: str = "") -> None:
        """Add content that is kept; the model reads `visible` in its place."""
        self._events.append(_Event("verbatim", literal, _SPACES.sub(" ", visible).strip()))

    def open(self, name: str, literal: str) -> None:
        """Add the opening of an element."""
        self._events.append(_Event("open", literal, name=name))

    def close(self, name: str, literal: str) -> None:
        """Add the closing of an element."""
        self._events.append(_Event("close", literal, name=name))

    def finish(self) -> list[Part]:
        """Parts of the block, which is empty afterwards."""
        events, self._events = self._events, []
        pairs = _pairs(events)
        parts: list[Part] = []
        start = 0
        for index in [*_borders(events, pairs), len(events)]:
            parts += self._passage(events[start:index], pairs, start)
            if index < len(events):
                parts.append(events[index].literal)
            start = index + 1
        return parts

    def _passage(
        self, events: Sequence[_Event], pairs: dict[int, int], first: int
    ) -> Iterator[Part]:
        """White space, a passage and white space.

        Events without a letter, and elements that are nested too deeply, are kept.

        Args:
            events: Consecutive events.
            pairs: Closing of each opening, by indices.
            first: Index of the first of `events`.
        """
        literal = "".join(event.literal for event in events)
        has_letters = any(c.isalpha() for e in events if e.kind == "text" for c in e.visible)
        if not has_letters or _depth(events) > _DEEPEST:
            yield literal
            return
        text, marks = _plain(events, pairs, first)
        yield _edge(events)
        yield Passage(text, marks, **self._settings)
        yield _edge(events[::-1], is_end=True)


def _depth(events: Sequence[_Event]) -> int:
    """Number of elements around the innermost one, itself included."""
    steps = ({"open": 1, "close": -1}.get(event.kind, 0) for event in events)
    return max(accumulate(steps), default=0)


class _PlainText:
    """Plain text whose words are separated by single spaces, and the marks in it."""

    def __init__(self) -> None:
        self.text, self.marks = "", list[Mark]()
        # Markup behind the last character, as a mark and its field, and white space behind that.
        self._last: tuple[int, str] | None = None
        self._space = ""

    def add_text(self, visible: str) -> None:
        """Add text; white space that would be a second space becomes part of the markup before."""
        added = _SPACES.sub(" ", visible)
        if added.startswith(" ") and (not self.text or self.text.endswith(" ")):
            added = added[1:]
            self._space = " " if self.text else visible[: -len(visible.lstrip()) or None]
        if added:
            self._place_space()
            self.text += added
            self._last = None

    def add_mark(self, literal: str, visible: str = "", *, is_verbatim: bool = False) -> int:
        """Add a mark and return its index."""
        self._place_space()
        if is_verbatim or not self.text:
            self._last = len(self.marks), "opening"
        start = len(self.text)
        self.text += visible
        self.marks.append(Mark(start, len(self.text), literal, is_verbatim=is_verbatim))
        return len(self.marks) - 1

    def close(self, index: int, literal: str) -> None:
        """Close a mark."""
        inner = len(self.marks) - index - 1
        self.marks[index] = self.marks[index]._replace(
            end=len(self.text), closing=literal, inner=inner
        )
        # Behind a word, the space that follows the word is enough.
        is_empty = self.marks[index].start == len(self.text)
        self._last = (index, "closing") if is_empty else None

    def finished(self) -> tuple[str, tuple[Mark, ...]]:
        """The text without white space at its end, and its marks."""
        end = len(self.text.rstrip())
        for index, mark in enumerate(self.marks):
            if mark.start > end:
                self.marks[index] = mark._replace(opening=f" {mark.opening}")
                break
        clipped = (m._replace(start=min(m.start, end), end=min(m.end, end)) for m in self.marks)
        return self.text[:end], tuple(clipped)

    def _place_space(self) -> None:
        if self._last is not None and self._space:
            index, field = self._last
            longer = getattr(self.marks[index], field) + self._space
            self.marks[index] = self.marks[index]._replace(**{field: longer})
        self._space = ""


def _plain(
    events: Sequence[_Event], pairs: dict[int, int], first: int
) -> tuple[str, tuple[Mark, ...]]:
    """Plain text of events, and the marks in it; arguments as in `_passage`."""
    plain, opened = _PlainText(), dict[int, int]()
    for index, event in enumerate(events, first):
        match event.kind:
            case "text":
                plain.add_text(event.visible)
            case "verbatim":
                plain.add_mark(event.literal, event.visible, is_verbatim=True)
            case "open":
                opened[pairs[index]] = plain.add_mark(event.literal)
            case "close":
                plain.close(opened[index], event.literal)
    return plain.finished()


def _edge(events: Sequence[_Event], *, is_end: bool = False) -> str:
    """White space before the first visible character or opening, or after the last character."""
    spaces: list[str] = []
    for event in events:
        if event.kind == "verbatim" or (event.kind == "open" and not is_end):
            break
        if event.kind != "text":
            continue
        text = event.visible
        rest = text.rstrip() if is_end else text.lstrip()
        if rest:
            spaces.append(text[len(rest) :] if is_end else text[: len(text) - len(rest)])
            break
        spaces.append(text)
    return "".join(spaces[::-1] if is_end else spaces)


def _pairs(events: Sequence[_Event]) -> dict[int, int]:
    """Index of the closing for each opening that has one; the pairs are nested properly."""
    pairs: dict[int, int] = {}
    stack: list[int] = []
    is_open: Counter[str] = Counter()
    for index, event in enumerate(events):
        if event.kind == "open":
            stack.append(index)
            is_open[event.name] += 1
        elif event.kind == "close" and is_open[event.name]:
            while events[stack[-1]].name != event.name:
                is_open[events[stack.pop()].name] -= 1
            is_open[event.name] -= 1
            pairs[stack.pop()] = index
    return pairs


def _borders(events: Sequence[_Event], pairs: dict[int, int]) -> list[int]:
    """Indices of markup that separates passages: without partner, or around such markup."""
    paired = {*pairs, *pairs.values()}
    single = [
        index
        for index, event in enumerate(events)
        if event.kind in ("open", "close") and index not in paired
    ]
    before = [0] * (len(events) + 1)
    for index in single:
        before[index + 1] = 1
    for index in range(len(events)):
        before[index + 1] += before[index]
    around = [
        index
        for opening, closing in pairs.items()
        if before[closing] > before[opening]
        for index in (opening, closing)
    ]
    return sorted([*single, *around])
