"""Plain running text: paragraphs, wrapped or on one line each."""

import re
from functools import partial

from reluformer.documents.builder import Builder
from reluformer.documents.passage import Part
from reluformer.documents.wrapping import wrap, wrapped_width

# Signs before the text of a list item, a heading or a quotation.
_ITEM = re.compile(r"\s*(?:[-*+•·–—>#]+|\(?\d{1,4}[.)]|\[[ xX]\])\s+")
_LINE = re.compile(r"([^\r\n]*)(\r\n|\n|\r|\Z)")


def split_lines(text: str) -> list[tuple[str, str]]:
    """Lines, each with the characters that end it; a last line without end has "" there."""
    lines = [match.groups() for match in _LINE.finditer(text)]
    return [(line, end) for line, end in lines if line or end]


def parse_text(text: str) -> list[Part]:
    """Parts of a plain text.

    Blank lines separate paragraphs. The lines of a wrapped paragraph are joined and wrapped again
    to the same width; other lines are paragraphs of their own.
    """
    parts: list[Part] = []
    paragraph: list[tuple[str, str]] = []
    for line, end in [*split_lines(text), ("", "")]:
        if line.strip():
            paragraph.append((line, end))
        else:
            parts += [*_paragraph(paragraph), line, end]
            paragraph = []
    return parts


def _paragraph(lines: list[tuple[str, str]]) -> list[Part]:
    width = wrapped_width([line for line, _ in lines]) if lines else None
    if width is None:
        return [part for line, end in lines for part in (*_passage(Builder(), line), end)]
    # The second line has no mark of a list item or a quotation's first line.
    second = lines[1][0]
    indent = second[: len(second) - len(second.lstrip())]
    lay_out = partial(wrap, width=width - len(indent), end=lines[0][1], prefix=indent)
    joined = "\n".join(line for line, _ in lines)
    return [*_passage(Builder(lay_out=lay_out), joined), lines[-1][1]]


def _passage(builder: Builder, text: str) -> list[Part]:
    item = _ITEM.match(text)
    start = item.group() if item else ""
    builder.text(text.removeprefix(start))
    return [start, *builder.finish()]
