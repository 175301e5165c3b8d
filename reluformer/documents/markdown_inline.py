"""Inline markup of Markdown: markdown-it's tokens, followed through the source."""

import re

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
_NOTE = re.compile(r"\[![A-Z]+\]\s*")
"""The kind of a note, which has a line of its own."""
_TICKS = re.compile(r"`+")
# Footnotes, kinds of notes, wiki links, fields of templates and mathematics are no text.
_KEPT = re.compile(
    r"(?<!\\)(?:\[\^[^\]\s]+\]:?|\[![A-Z]+\]|\[\[[^\[\]\n]+\]\]|\{\{[^{}\n]*\}\}"
    r"|\$\$[^$\n]+\$\$|\$(?=[^\s$])[^$\n]*?(?<=[^\s\\])\$(?!\d))"
)


class Untraceable(Exception):
    """A token is not at its place in the source."""


class InlineReader:
    """Reads the source of one block, guided by its tokens."""

    def __init__(self, token: Token) -> None:
        self._source, self._children = token.content, token.children or []
        self._position = 0
        self._kept = [match.span() for match in _KEPT.finditer(self._source)]
        """Places of what is no text, in order."""
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
            if child.markup == "autolink":
                inside_address += child.nesting
                if inside_address:
                    builder.verbatim(self._until(">"))
            elif not inside_address and child.type == "hardbreak":
                parts += [*builder.finish(), self._match(_HARD_BREAK)]
            elif child.type == "softbreak" and _NOTE.fullmatch(self._source[: self._position]):
                parts += [*builder.finish(), self._match(_SOFT_BREAK)]
            elif not inside_address:
                self._read(child, builder)
        rest = self._source[self._position :]
        if rest.strip():
            raise Untraceable
        return [*parts, *builder.finish(), rest]

    def _read(self, child: Token, builder: Builder) -> None:
        """Move behind a token, and add it to the block."""
        if child.type != "text" and self._is_inside:
            raise Untraceable
        match child.type:
            case "text":
                self._text(child.content, builder)
            case "text_special":
                builder.text(self._literal(child.markup), child.content)
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
