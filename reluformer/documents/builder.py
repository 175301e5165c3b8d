"""Building of passages from text and inline markup in the order of the document."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

from reluformer.documents.passage import Mark, Part, Passage

_SPACES = re.compile(r"\s+")
# Addresses are kept as they are. A full stop or bracket at the end belongs to the sentence.
_ADDRESS = re.compile(
    r"\b(?:https?://|www\.)[^\s<>()\[\]\"]*[^\s<>()\[\]\".,;:!?'*_]"
    r"|\b[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,8}"
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

    def text(self, literal: str, visible: str | None = None) -> None:
        """Add text; `visible` is its plain text if the format writes it differently."""
        if visible is not None:
            self._events.append(_Event("text", literal, visible))
            return
        end = 0
        for match in _ADDRESS.finditer(literal):
            if match.start() > end:
                self._events.append(_Event("text", *[literal[end : match.start()]] * 2))
            self.verbatim(match.group(), match.group())
            end = match.end()
        if end < len(literal):
            self._events.append(_Event("text", *[literal[end:]] * 2))

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


def _plain(
    events: Sequence[_Event], pairs: dict[int, int], first: int
) -> tuple[str, tuple[Mark, ...]]:
    """Plain text of events, and the marks in it; arguments as in `_passage`."""
    text, starts, marks, last_spaced = "", dict[int, int](), list[Mark](), -1
    for index, event in enumerate(events, first):
        if event.kind == "text":
            added = _SPACES.sub(" ", event.visible)
            if added.startswith(" ") and (not text or text.endswith(" ")):
                added = added[1:]
                # Without this space, an image would touch the next word.
                if marks and marks[-1].is_verbatim and marks[-1].start == len(text):
                    marks[-1] = marks[-1]._replace(opening=f"{marks[-1].opening} ")
                    last_spaced = len(marks) - 1
            text += added
        elif event.kind == "verbatim":
            marks.append(Mark(len(text), len(text + event.visible), event.literal, "", True))
            text += event.visible
        elif event.kind == "open":
            starts[pairs[index]] = len(marks)
            marks.append(Mark(len(text), len(text), event.literal))
        else:
            at = starts[index]
            inner = len(marks) - at - 1
            marks[at] = marks[at]._replace(end=len(text), closing=event.literal, inner=inner)
    end = len(text.rstrip())
    behind = [i for i, mark in enumerate(marks) if mark.is_verbatim and mark.start > end]
    if behind:
        marks[behind[0]] = marks[behind[0]]._replace(opening=f" {marks[behind[0]].opening}")
        if behind[-1] == last_spaced:
            marks[last_spaced] = marks[last_spaced]._replace(
                opening=marks[last_spaced].opening[:-1]
            )
    clipped = (m._replace(start=min(m.start, end), end=min(m.end, end)) for m in marks)
    return text[:end], tuple(clipped)


def _edge(events: Sequence[_Event], *, is_end: bool = False) -> str:
    """White space before the first visible character, or after the last one."""
    spaces: list[str] = []
    for event in events:
        if event.kind == "verbatim":
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
