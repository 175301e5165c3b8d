"""Reading of reference and hypothesis files, aligned sentence by sentence."""

import sys
from collections.abc import Sequence
from pathlib import Path

from reluformer.data.text import DOCUMENT, is_border, lines
from reluformer.errors import UserError

# Limit of one file. A small compressed file can expand to any size.
_MOST_BYTES = 2**29

Documents = list[list[str]]
"""Sentences by document; without documents, every sentence is a document of its own."""


def read_aligned(
    reference: Path | str, hypotheses: Sequence[Path | str], *, documents: bool = False
) -> tuple[Documents, list[Documents]]:
    """Read a reference and the hypotheses that translate its sentences.

    `<d>` lines and blank lines in the reference separate documents. A hypothesis has such lines in
    the same places, or none at all. An empty line in place of a sentence is an empty translation.

    Args:
        reference: Text file with one sentence per line.
        hypotheses: Text files of the systems.
        documents: Group sentences by document.

    Returns:
        The reference, and each hypothesis, as sentences by document.

    Raises:
        UserError: A file cannot be read, or its lines do not match those of the reference.
    """
    reference_lines = _read(Path(reference))
    borders = [is_border(line) for line in reference_lines]
    if all(borders):
        raise UserError(f"{reference} has no sentence")
    if documents and not any(borders):
        raise UserError(f"{reference} has no {DOCUMENT} line or blank line to separate documents")
    sentences = _sentences(reference_lines, borders)
    systems = [_aligned(Path(reference), borders, Path(path)) for path in hypotheses]
    return (
        _group(sentences, borders, documents),
        [_group(system, borders, documents) for system in systems],
    )


def _aligned(reference: Path, borders: list[bool], path: Path) -> list[str]:
    """Lines of `path` that translate the sentences of the reference."""
    hypothesis = _read(path)
    count = borders.count(False)
    if len(hypothesis) == count and not any(line.strip() == DOCUMENT for line in hypothesis):
        return hypothesis
    if len(hypothesis) != len(borders):
        raise UserError(
            f"{path} has {len(hypothesis)} lines, but {reference} has {len(borders)}, of which "
            f"{count} are sentences"
        )
    for number, (line, border) in enumerate(zip(hypothesis, borders, strict=True), 1):
        if border and not is_border(line):
            raise UserError(f"{path}, line {number} is a sentence where {reference} has none")
        if not border and line.strip() == DOCUMENT:
            raise UserError(f"{path}, line {number} is {DOCUMENT} where {reference} has a sentence")
    return _sentences(hypothesis, borders)


def _read(path: Path) -> list[str]:
    """All lines of a text file, which may be compressed, within `_MOST_BYTES` of memory."""
    result: list[str] = []
    size = 0
    for line in lines(path):
        size += sys.getsizeof(line)
        if size > _MOST_BYTES:
            raise UserError(f"{path} needs more than {_MOST_BYTES // 2**20} MiB of memory")
        result.append(line)
    return result


def _sentences(all_lines: list[str], borders: list[bool]) -> list[str]:
    return [line for line, border in zip(all_lines, borders, strict=True) if not border]


def _group(sentences: list[str], borders: list[bool], documents: bool) -> Documents:
    if not documents:
        return [[sentence] for sentence in sentences]
    groups: Documents = [[]]
    rest = iter(sentences)
    for border in borders:
        if border:
            groups.append([])
        else:
            groups[-1].append(next(rest))
    return [group for group in groups if group]
