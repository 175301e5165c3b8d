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


BYTE_ORDER_MARK = "\ufeff"

# Endings of files whose text would be translated together with their structure.
_COMPRESSED = (".gz", ".xz")
_UNREADABLE = (".vtt", ".ass", ".docx", ".odt", ".rtf", ".pdf")

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
    # Editors of Windows begin files with this mark.
    mark = BYTE_ORDER_MARK if text.startswith(BYTE_ORDER_MARK) else ""
    parts = FORMATS[name].parse(text.removeprefix(mark))
    return [mark, *parts] if mark else parts


def format_by_name(path: Path) -> str | None:
    """Name of the format that the ending of a file's name says, or None.

    Raises:
        UserError: The file has a format that is not read, or a document is compressed.
    """
    ending = path.suffix.lower()
    if ending in _UNREADABLE:
        formats = ", ".join(name for name in FORMATS if name != "text")
        raise UserError(f"{path}: {ending} files are not read; convert it to one of {formats}")
    name = next((name for name, format_ in FORMATS.items() if ending in format_.endings), None)
    if ending in _COMPRESSED and format_by_name(path.with_suffix("")) not in (None, "text"):
        check_uncompressed(path)
    return name


def check_uncompressed(path: Path) -> None:
    """Raise a `UserError` if the ending of a document's name says that it is compressed."""
    if path.suffix.lower() in _COMPRESSED:
        raise UserError(f"{path}: a document must not be compressed")
