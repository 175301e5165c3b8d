"""The formats of documents, by name and by the ending of a file's name."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from reluformer.documents.html import parse_html
from reluformer.documents.markdown import parse_markdown
from reluformer.documents.passage import Part
from reluformer.documents.plain_text import parse_text
from reluformer.documents.subtitles import parse_srt
from reluformer.errors import UserError


class Format(NamedTuple):
    """A format of documents."""

    parse: Callable[[str], list[Part]]
    """From a document to its parts. Parts with untranslated passages concatenate to it."""
    endings: tuple[str, ...]
    media_type: str


FORMATS = {
    "text": Format(parse_text, (".txt", ".text"), "text/plain"),
    "markdown": Format(parse_markdown, (".md", ".markdown"), "text/markdown"),
    "html": Format(parse_html, (".html", ".htm", ".xhtml"), "text/html"),
    "srt": Format(parse_srt, (".srt",), "application/x-subrip"),
}


def parse(text: str, name: str) -> list[Part]:
    """Parts of a document.

    Args:
        text: The document.
        name: Name of its format, one of `FORMATS`.

    Raises:
        UserError: There is no such format.
    """
    if name not in FORMATS:
        raise UserError(f"format must be one of {', '.join(FORMATS)}, got {name!r}")
    return FORMATS[name].parse(text)


def format_by_name(path: Path) -> str | None:
    """Name of the format that the ending of a file's name says, or None."""
    ending = path.suffix.lower()
    return next((name for name, format_ in FORMATS.items() if ending in format_.endings), None)
