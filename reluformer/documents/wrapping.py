"""Line breaks of translations, like those of the original."""

from collections.abc import Sequence

# Widths of text that was wrapped by a program or a careful person.
_NARROWEST, _WIDEST = 36, 132


def wrapped_width(lines: Sequence[str]) -> int | None:
    """Width that a paragraph was wrapped to, or None if its lines end elsewhere.

    In a wrapped paragraph the first word of a line does not fit into the line before.
    """
    width = max(map(len, lines))
    if len(lines) < 2 or not _NARROWEST <= width <= _WIDEST:
        return None
    for line, following in zip(lines, lines[1:], strict=False):
        first_word = following.split(maxsplit=1)[0]
        if len(line.rstrip()) + 1 + len(first_word) <= width:
            return None
    return width


def wrap(text: str, width: int, end: str = "\n", prefix: str = "") -> str:
    """Break text into lines of at most `width` characters where words allow it.

    Args:
        text: Words separated by white space.
        width: Longest line, without `prefix`.
        end: Characters that end a line.
        prefix: Characters before every line but the first.
    """
    lines: list[str] = []
    for word in text.split():
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return f"{end}{prefix}".join(lines)


def balance(text: str, count: int, end: str = "\n") -> str:
    """Break text into at most `count` lines of similar lengths."""
    words = text.split()
    lines: list[str] = []
    rest = sum(map(len, words)) + len(words)
    for left in range(count, 1, -1):
        line: list[str] = []
        length, goal = 0, rest / left
        # A word belongs to the line that holds more than half of it.
        while words and length + (len(words[0]) + 1) / 2 < goal:
            line.append(words.pop(0))
            length += len(line[-1]) + 1
        rest -= length
        lines += [" ".join(line)] * bool(line)
    return end.join([*lines, *[" ".join(words)] * bool(words)])
