"""Parts of a document: passages of running text, and everything between them, which is kept."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Mark(NamedTuple):
    """Inline markup around the characters [start, end) of a passage's text.

    Marks of a passage are nested properly and listed in the order of their openings.
    """

    start: int
    end: int
    opening: str
    """Markup before the characters, or the whole markup with its content if `is_verbatim`."""
    closing: str = ""
    is_verbatim: bool = False
    """Whether the content is never translated: code, addresses, images."""
    inner: int = 0
    """Number of marks inside this one, which follow it in the list."""


def _unchanged(text: str) -> str:
    return text


@dataclass(frozen=True)
class Passage:
    """A paragraph, heading, list item, table cell or subtitle."""

    text: str
    """Text without markup and line ends, words separated by single spaces."""
    marks: tuple[Mark, ...] = ()
    escape: Callable[[str], str] = _unchanged
    """Turns plain text into text of the format."""
    lay_out: Callable[[str], str] = _unchanged
    """Breaks the finished translation into lines, as the original was."""


Part = str | Passage
"""A passage, or markup and white space that are kept as they are."""


def join_parts(parts: Sequence[Part], passages: Sequence[str]) -> str:
    """Put together a document.

    Args:
        parts: All parts, in order.
        passages: One text in the document's format for each passage among `parts`.
    """
    finished = iter(passages)
    return "".join(part if isinstance(part, str) else next(finished) for part in parts)
