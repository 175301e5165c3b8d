"""Markdown: text is translated; code, addresses, front matter and all markup stay as they are.

The blocks and their inline markup are those of markdown-it, a CommonMark parser. A block whose
source cannot be followed exactly is kept untranslated.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from markdown_it import MarkdownIt
from markdown_it.token import Token

from reluformer.documents.builder import Builder
from reluformer.documents.html import parse_html
from reluformer.documents.markdown_inline import InlineReader, Untraceable
from reluformer.documents.passage import Mark, Part
from reluformer.documents.plain_text import split_lines
from reluformer.documents.projection import HIDDEN_SPACE
from reluformer.documents.wrapping import wrap

# YAML, or TOML as Hugo reads it.
_FRONT_MATTER = re.compile(
    r"(?:---[ \t]*\r?\n(?:.*\r?\n)*?(?:---|\.\.\.)|\+{3}[ \t]*\r?\n(?:.*\r?\n)*?\+{3})"
    r"[ \t]*(?:\r?\n|\Z)"
)
_SPECIAL = re.compile(r"[\\`*\[<~]|(?<!\w)_|_(?!\w)|\]|&(?=#?\w+;)")
_LINE_START = re.compile(
    rf"(?m)^(?:(\d{{1,9}})(?=[.)](?:[\s{HIDDEN_SPACE}]|$))"
    rf"|(?=[-+](?:[\s{HIDDEN_SPACE}]|$)|[#>=|]|-{{2,}}|:-))"
)


def parse_markdown(text: str) -> list[Part]:
    """Parts of a CommonMark document with tables, strikethrough and YAML front matter."""
    front = _FRONT_MATTER.match(text)
    head = front.group() if front else ""
    lines = split_lines(text[len(head) :])
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    # Escaped characters stay tokens of their own, with their source.
    parser.disable("text_join")
    parser.options["store_labels"] = True
    parts: list[Part] = [head]
    cursor = _Cursor(lines)
    tokens = parser.parse("\n".join(line for line, _ in lines))
    for parent, token in zip([None, *tokens], tokens, strict=False):
        if token.type == "html_block" and token.map:
            parts += cursor.up_to(token.map[0])
            parts += parse_html("".join(cursor.up_to(token.map[1])))
        elif token.type == "inline" and token.map and token.content:
            parts += cursor.block(token, parent, token.map[0])
    return [*parts, *cursor.up_to(len(lines))]


class _Cursor:
    """Position in the lines of a document: a line, and a character in it."""

    def __init__(self, lines: list[tuple[str, str]]) -> None:
        self.lines, self.line, self.character = lines, 0, 0

    def up_to(self, line: int, character: int = 0) -> list[str]:
        """Source from here up to a place; that place becomes the present one."""
        skipped = []
        while self.line < line:
            text, end = self.lines[self.line]
            skipped += [text[self.character :], end]
            self.line, self.character = self.line + 1, 0
        if self.line == line and character > self.character:
            skipped.append(self.lines[line][0][self.character : character])
            self.character = character
        return skipped

    def block(self, token: Token, parent: Token | None, first: int) -> list[Part]:
        """Parts of the source up to the end of an inline token.

        Args:
            token: The inline token.
            parent: Opening of the block that contains it.
            first: Its first line.
        """
        places = []
        line, least = first, self.character if first == self.line else 0
        for content in token.content.split("\n"):
            start = self.lines[line][0].find(content, least) if line < len(self.lines) else -1
            if start < 0 or first < self.line:
                return []
            places.append((line, start, start + len(content)))
            line, least = line + 1, 0
        before: list[Part] = [*self.up_to(first, places[0][1])]
        prefix = self.lines[places[1][0]][0][: places[1][1]] if len(places) > 1 else ""
        end_of_line = self.lines[first][1] or "\n"
        kept = self.up_to(places[-1][0], places[-1][2])
        is_cell = parent is not None and parent.type in ("th_open", "td_open")
        # Behind "#" or "|", no character begins another block.
        is_inside = is_cell or (parent is not None and parent.markup.startswith("#"))
        layout = None if is_inside else _layout(token, end_of_line, prefix)
        builder = Builder(partial(_escape, pipes=is_cell), layout)
        try:
            inside = InlineReader(token).parts(builder)
        except Untraceable:
            return [*before, *kept]
        return [*before, *_with_line_ends(inside, end_of_line + prefix)]


def _with_line_ends(parts: list[Part], end: str) -> Iterator[Part]:
    """Parts of a block whose kept content has the line ends of the document, prefixes included."""

    def changed(mark: Mark) -> Mark:
        opening, closing = (text.replace("\n", end) for text in (mark.opening, mark.closing))
        return mark._replace(opening=opening, closing=closing)

    for part in parts:
        if isinstance(part, str):
            yield part.replace("\n", end)
        else:
            yield replace(part, marks=tuple(map(changed, part.marks)))


def _layout(token: Token, end: str, prefix: str) -> Callable[[str], str]:
    """Wraps a translation to the width of its source, and escapes what would begin a block."""
    lines = token.content.split("\n")
    width = max(map(len, lines)) if len(lines) > 1 else 10**9
    return partial(_wrap, width=width, end=end, prefix=prefix)


def _wrap(text: str, width: int, end: str, prefix: str) -> str:
    # A tag at the start of a line may begin a block.
    lines = re.sub(r"\n(?=<)", " ", wrap(text, width)).split("\n")
    return f"{end}{prefix}".join(_LINE_START.sub(_escape_start, line) for line in lines)


def _escape_start(match: re.Match[str]) -> str:
    return f"{match.group(1) or ''}\\"


def _escape(text: str, *, pipes: bool) -> str:
    escaped = _SPECIAL.sub(lambda match: f"\\{match.group()}", text)
    return escaped.replace("|", "\\|") if pipes else escaped
