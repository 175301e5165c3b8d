"""HTML: text outside of code, scripts and styles is translated; tags stay as they are."""

import html
import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from reluformer.documents.builder import Builder
from reluformer.documents.passage import Part

# Elements inside a sentence.
INLINE = frozenset(
    {"a", "abbr", "acronym", "b", "bdi", "bdo", "big", "cite", "del", "dfn", "em", "font", "i"}
    | {"ins", "mark", "q", "s", "small", "span", "strike", "strong", "sub", "sup", "u"}
)
# Elements inside a sentence whose content is not translated.
_INLINE_VERBATIM = frozenset(["code", "kbd", "samp", "svg", "math", "tt", "var"])
_VERBATIM = frozenset(["pre", "script", "style", "textarea", "template", "xmp"])
_EMPTY = frozenset(["img", "input", "wbr"])
# Elements whose content is plain characters, in which tags mean nothing.
_RAW = frozenset(["script", "style", "textarea", "xmp"])
_OTHER_EMPTY = frozenset(
    {"area", "base", "br", "col", "embed", "hr", "link", "meta", "param", "source", "track"}
)

# Any other "<" is text.
_MARKUP = re.compile(r"<(?:/?[a-zA-Z]|[!?])")
_NAME = re.compile(r"<(/?)([a-zA-Z][^\s/>]*)")
_TAG_END = re.compile(r"""(?:[^"'>]++|"[^"]*+"|'[^']*+')*+>""")
_UNTRANSLATED = re.compile(
    r"""\stranslate\s*=\s*["']?no\b|\sclass\s*=\s*["'][^"']*\bnotranslate\b""", re.IGNORECASE
)


class Token(NamedTuple):
    """A piece of HTML; all pieces concatenate to the document."""

    kind: Literal["text", "open", "close", "other"]
    literal: str
    name: str = ""


def tokenize(text: str) -> Iterator[Token]:
    """Split HTML into tags, text, and the rest: comments, declarations, contents of scripts.

    Invalid HTML is split, too, in time that is linear in its length.
    """
    position = 0
    while position < len(text):
        markup = _MARKUP.search(text, position)
        start = markup.start() if markup else len(text)
        if start > position:
            yield Token("text", text[position:start])
        if start == len(text):
            return
        token = _markup(text, start)
        yield token
        position = start + len(token.literal)
        if token.kind == "open" and token.name in _RAW and not token.literal.endswith("/>"):
            end = re.compile(f"</{token.name}", re.IGNORECASE).search(text, position)
            stop = end.start() if end else len(text)
            if stop > position:
                yield Token("other", text[position:stop])
            position = stop


def _markup(text: str, start: int) -> Token:
    """The tag, comment or declaration at `start`; one without end extends to the document's."""
    if text.startswith("<!--", start):
        end = text.find("-->", start + 4)
        return Token("other", text[start : end + 3 if end >= 0 else len(text)])
    named = _NAME.match(text, start)
    if named is None:
        end = text.find(">", start)
        return Token("other", text[start : end + 1 if end >= 0 else len(text)])
    closed = _TAG_END.match(text, named.end())
    if closed is None:
        return Token("other", text[start:])
    kind: Literal["open", "close"] = "close" if named.group(1) else "open"
    return Token(kind, text[start : closed.end()], named.group(2).lower())


def parse_html(text: str) -> list[Part]:
    """Parts of an HTML document or fragment."""
    tokens = list(tokenize(text))
    closings = _closings(tokens)
    builder = Builder(escape=_escape)
    parts: list[Part] = []
    index = 0
    while index < len(tokens):
        token = tokens[index]
        end = _verbatim_end(token, index, closings)
        if end > index:
            literal = "".join(inner.literal for inner in tokens[index:end])
            if token.name in INLINE | _INLINE_VERBATIM | _EMPTY:
                shown = (html.unescape(t.literal) for t in tokens[index:end] if t.kind == "text")
                builder.verbatim(literal, "" if token.name == "svg" else "".join(shown))
            else:
                parts += [*builder.finish(), literal]
            index = end
            continue
        if token.kind == "text":
            builder.text(token.literal, html.unescape)
        elif not add_inline_tag(builder, token):
            parts += [*builder.finish(), token.literal]
        index += 1
    return [*parts, *builder.finish()]


def add_inline_tag(builder: Builder, token: Token) -> bool:
    """Add a tag that may stand inside a sentence, or a comment; False for any other token."""
    if token.name in INLINE and not token.literal.endswith("/>"):
        (builder.open if token.kind == "open" else builder.close)(token.name, token.literal)
    elif token.literal.startswith("<!--") or token.name in INLINE | _EMPTY:
        builder.verbatim(token.literal)
    else:
        return False
    return True


def _escape(plain: str) -> str:
    return html.escape(plain, quote=False)


def _closings(tokens: list[Token]) -> dict[int, int]:
    """Index of the closing tag for each opening tag that has one."""
    closings: dict[int, int] = {}
    stacks: dict[str, list[int]] = {}
    for index, token in enumerate(tokens):
        if token.kind == "open":
            stacks.setdefault(token.name, []).append(index)
        elif token.kind == "close" and stacks.get(token.name):
            closings[stacks[token.name].pop()] = index
    return closings


def _verbatim_end(token: Token, index: int, closings: dict[int, int]) -> int:
    """End of the element at `index` if its content is not translated, otherwise `index`."""
    if token.kind != "open":
        return index
    if token.name in _EMPTY:
        return index + 1
    is_marked = bool(_UNTRANSLATED.search(token.literal)) and token.name not in _OTHER_EMPTY
    if not is_marked and token.name not in _VERBATIM | _INLINE_VERBATIM:
        return index
    if token.literal.endswith("/>"):
        return index + 1
    return closings.get(index, index - 1) + 1
