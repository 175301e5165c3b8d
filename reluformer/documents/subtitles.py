"""SubRip subtitles (.srt): numbers and times stay, each subtitle keeps its number of lines."""

import re
from functools import partial

from reluformer.documents.builder import Builder
from reluformer.documents.html import add_inline_tag, tokenize
from reluformer.documents.passage import Part
from reluformer.documents.plain_text import split_lines
from reluformer.documents.wrapping import balance

# Some programs leave out hours or milliseconds.
_TIME = re.compile(r"\s*\d+(?::\d+){1,2}(?:[,.]\d+)?\s*-->")
_NUMBER = re.compile(r"\s*\d+\s*")
_POSITION = re.compile(r"(\{\\[^{}]*\})")
_DIALOGUE = re.compile(r"(?:\{\\[^{}]*\}|<[^<>]*>)*\s*[-–—]\s*")


def parse_srt(text: str) -> list[Part]:
    """Parts of subtitles; only lines between a time and the next blank line are text."""
    parts: list[Part] = []
    spoken: list[tuple[str, str]] = []
    is_text = False
    for line, end in [*split_lines(text), ("", "")]:
        is_time = bool(_TIME.match(line))
        if is_text and line.strip() and not is_time:
            spoken.append((line, end))
            continue
        # Without a blank line, the number of this subtitle follows the text of the last one.
        has_number = is_time and bool(spoken) and bool(_NUMBER.fullmatch(spoken[-1][0]))
        number = spoken.pop() if has_number else ()
        parts += [*_subtitle(spoken), *number, line, end]
        spoken = []
        is_text = is_time or (is_text and bool(line.strip()))
    return parts


def _subtitle(lines: list[tuple[str, str]]) -> list[Part]:
    """One passage, or one for each line if the lines have different speakers."""
    if sum(bool(_DIALOGUE.match(line)) for line, _ in lines) > 1 or len(lines) < 2:
        return [part for line, end in lines for part in (*_passage(line, 1, end), end)]
    joined = "\n".join(line for line, _ in lines)
    return [*_passage(joined, len(lines), lines[0][1]), lines[-1][1]]


def _passage(text: str, count: int, end: str) -> list[Part]:
    builder = Builder(lay_out=partial(balance, count=count, end=end) if count > 1 else None)
    dash = _DIALOGUE.match(text)
    start = dash.group() if dash else ""
    for piece in _POSITION.split(text.removeprefix(start)):
        if _POSITION.fullmatch(piece):
            builder.verbatim(piece)
            continue
        for token in tokenize(piece):
            if token.kind == "text" or not add_inline_tag(builder, token):
                builder.text(token.literal)
    return [start, *builder.finish()]
