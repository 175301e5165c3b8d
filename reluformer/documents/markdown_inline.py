"""Inline markup of Markdown: markdown-it's tokens, followed through the source."""

import re
from collections.abc import Iterator

from markdown_it.common.utils import normalizeReference
from markdown_it.helpers import parseLinkDestination, parseLinkTitle
from markdown_it.token import Token

from reluformer.documents.builder import Builder
from reluformer.documents.html import add_inline_tag, tokenize
from reluformer.documents.passage import Part

_HARD_BREAK = re.compile(r"(?: *|\\)\n[ \t]*")
_SOFT_BREAK = re.compile(r"[ \t]*\n[ \t]*")
_LABEL = re.compile(r"\[((?:\\.|[^\[\]\\])*+)\]", re.DOTALL)
_SPACE = re.compile(r"[ \t\n]*")
_TASK = re.compile(r"\[[ xX]\](?=\s)")
_TICKS = re.compile(r"`+")
# What is no text. A block has lines of its own if no text is beside it.
_KEPT = re.compile(
    r"(?<!\\)(?:(?P<block>"
    # Footnotes, kinds of notes, mathematics, attributes and tags, containers and admonitions.
    r"\[\^[^\]\s]+\]:|\[![A-Z]+\]|\$\$[^$]+\$\$|\{[#.:%][^{}\n]*\}"
    r"|^(?::{3}|(?:!!!|\?\?\?\+?)[ ][a-z]).*?(?=[ \t]*$))"
    # The colon of a definition; references to footnotes, wiki links, fields of templates.
    r"|(?P<definition>^:[ \t]+)|\[\^[^\]\s]+\]|\[\[[^\[\]\n]+\]\]|\{\{[^{}\n]*\}\}"
    # Mathematics in a line, pictures by name.
    r"|\$(?=[^\s$])[^$\n]*?(?<=[^\s\\])\$(?!\d)|(?<![\w:]):[a-z][a-z0-9_+-]{1,40}:(?!\w))",
    re.MULTILINE,
)


class Untraceable(Exception):
    """A token is not at its place in the source."""


class InlineReader:
    """Reads the source of one block, guided by its tokens."""

    def __init__(self, token: Token) -> None:
        self._source, self._children = token.content, token.children or []
        self._position = 0
        matches = list(_KEPT.finditer(self._source))
        self._kept = [match.span() for match in matches]
        """Places of what is no text, in order."""
        self._borders = {place for match in matches for place in _borders(match)}
        """Line ends that separate passages."""
        self._is_inside = False
        """Whether the position is inside the first of these places."""
        self._labels: list[str | None] = []
        """Labels of the links that are open; None for a link with an address."""

    def parts(self, builder: Builder) -> list[Part]:
        """Parts of the block; those that are kept concatenate with the passages to its source.

        Raises:
            Untraceable: A token is not at its place in the source.
        """
        parts: list[Part] = []
        inside_address = 0
        for child in self._children:
            if self._is_inside:
                self._continue(child, builder)
            elif child.markup == "autolink":
                inside_address += child.nesting
                if inside_address:
                    builder.verbatim(self._until(">"))
            elif inside_address:
                continue
            elif child.type == "hardbreak":
                parts += [*builder.finish(), self._match(_HARD_BREAK)]
            elif child.type == "softbreak" and self._is_at_border():
                parts += [*builder.finish(), self._match(_SOFT_BREAK).lstrip(" \t")]
            else:
                self._read(child, builder)
        rest = self._source[self._position :]
        if rest.strip() or self._is_inside:
            raise Untraceable
        return [*parts, *builder.finish(), rest]

    def _is_at_border(self) -> bool:
        return self._source.find("\n", self._position) in self._borders

    def _continue(self, child: Token, builder: Builder) -> None:
        """Move behind a token that begins inside of what is no text."""
        start = self._position
        match child.type:
            case "text" if "`" not in child.content:
                self._literal(child.content)
            case "text_special":
                self._literal(child.markup)
            case "softbreak":
                self._match(_SOFT_BREAK)
            case _:
                raise Untraceable
        self._text_and_kept(start, builder)

    def _read(self, child: Token, builder: Builder) -> None:
        """Move behind a token, and add it to the block."""
        match child.type:
            case "text":
                self._text(child.content, builder)
            case "text_special":
                builder.character(self._literal(child.markup), child.content)
            case "softbreak":
                builder.text(self._match(_SOFT_BREAK))
            case "code_inline":
                builder.verbatim(self._code(child.markup), child.content)
            case "html_inline":
                (tag, *others) = tokenize(self._literal(child.content))
                if others or not add_inline_tag(builder, tag):
                    builder.verbatim(child.content)
            case "image":
                opening = self._literal(f"![{child.content}")
                builder.verbatim(opening + self._link_end(child.meta.get("label"))[0])
            case "link_open":
                self._labels.append(child.meta.get("label"))
                builder.open("a", self._literal("["))
            case "link_close":
                literal, label = self._link_end(self._labels.pop())
                # A label stays as it is defined, also where the text served as label.
                builder.close("a", literal if label is None else f"][{label}]")
            case _:
                mark = builder.open if child.nesting == 1 else builder.close
                mark(child.tag + child.markup, self._literal(child.markup))

    def _text(self, text: str, builder: Builder) -> None:
        if not text:
            return
        # A backtick without partner may find one in a translation.
        if "`" in text:
            raise Untraceable
        # The box of a task list is no text.
        task = _TASK.match(text) if self._position == 0 else None
        start = self._position
        self._literal(text)
        if task:
            builder.verbatim(task.group())
            start += len(task.group())
        self._text_and_kept(start, builder)

    def _text_and_kept(self, start: int, builder: Builder) -> None:
        """Add the source from `start` to the position; what is kept may end in later tokens."""
        while self._kept and self._kept[0][0] < self._position:
            first, last = self._kept[0]
            if not self._is_inside:
                if first < start:
                    # It is part of markup.
                    del self._kept[0]
                    continue
                builder.text(self._source[start:first])
            self._is_inside = last > self._position
            if self._is_inside:
                return
            builder.verbatim(self._source[first:last])
            del self._kept[0]
            start = last
        builder.text(self._source[start : self._position])

    def _literal(self, text: str) -> str:
        if not text or not self._source.startswith(text, self._position):
            raise Untraceable
        self._position += len(text)
        return text

    def _match(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._source, self._position)
        if match is None:
            raise Untraceable
        self._position = match.end()
        return match.group()

    def _until(self, last: str) -> str:
        end = self._source.find(last, self._position)
        if end < 0:
            raise Untraceable
        return self._literal(self._source[self._position : end + len(last)])

    def _code(self, ticks: str) -> str:
        """A code span, which ends with as many backticks as it begins with."""
        start = self._position
        self._literal(ticks)
        for run in _TICKS.finditer(self._source, self._position):
            if run.group() == ticks:
                self._position = run.end()
                return self._source[start : self._position]
        raise Untraceable

    def _link_end(self, label: str | None) -> tuple[str, str | None]:
        """The source from the closing bracket on, and the label if the text served as label."""
        start = self._position
        self._literal("]")
        if label is None:
            self._address()
            return self._source[start : self._position], None
        follows = _LABEL.match(self._source, self._position)
        if follows and normalizeReference(follows.group(1)) == label:
            self._position = follows.end()
            return self._source[start : self._position], None
        if follows and not follows.group(1):
            self._position = follows.end()
        return self._source[start : self._position], label

    def _address(self) -> None:
        """Move behind the address and the title of a link."""
        source, most = self._source, len(self._source)
        self._literal("(")
        self._match(_SPACE)
        address = parseLinkDestination(source, self._position, most)
        if address.ok:
            self._position = address.pos
        self._match(_SPACE)
        title = parseLinkTitle(source, self._position, most)
        if title.ok:
            self._position = title.pos
        self._match(_SPACE)
        self._literal(")")


def _borders(kept: re.Match[str]) -> Iterator[int]:
    """Line ends around a block with lines of its own, or before a definition."""
    source, (first, last) = kept.string, kept.span()
    start, end = source.rfind("\n", 0, first), source.find("\n", last)
    end = len(source) if end < 0 else end
    begins_line = not source[start + 1 : first].strip()
    if begins_line and kept["definition"]:
        yield start
    if begins_line and kept["block"] and not source[last:end].strip():
        yield from (start, end)
