"""Translation of streams of lines: files, or standard input as it arrives."""

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from reluformer.data.text import DOCUMENT, is_border, open_text
from reluformer.files import atomic_path
from reluformer.translation.line_reader import LineReader
from reluformer.translation.workers import Unit, Workers

log = logging.getLogger("reluformer")

# Lines translated at once, if as many have arrived: enough for batches of similar lengths.
BLOCK = 256


class LineTranslator(Protocol):
    """A translator of numbered lines; `Translator` is one."""

    def lines(
        self, lines: Sequence[str], *, together: bool = False, numbers: Sequence[int] | None = None
    ) -> list[str]:
        """Translate each line."""


def translate_file(
    translator: LineTranslator, path: Path, output: Path, *, document: bool = False
) -> int:
    """Translate the lines of one file into another; return the number of lines."""
    with open_source(path) as file, open_target(output) as out:
        return translate_stream(translator, LineReader(file, str(path)), out, document=document)


def translate_stream(
    translator: LineTranslator,
    reader: LineReader,
    out: BinaryIO,
    *,
    document: bool = False,
    workers: Workers | None = None,
) -> int:
    """Translate every line of `reader` and write one line for each to `out`.

    Args:
        translator: Translates the lines.
        reader: Source lines.
        out: Receives UTF-8 text, flushed after every block.
        document: Translate the sentences of a document together.
        workers: Ranks that share the work. Every rank calls this function; only rank 0 uses
            `reader` and `out`.

    Returns:
        The number of lines; 0 on other ranks than 0.
    """
    workers = Workers() if workers is None else workers

    def work(units: list[Unit]) -> list[list[str]]:
        return _translate_units(translator, units, document)

    if workers.rank:
        workers.serve(work)
        return 0
    has_warned = False
    with workers.leading():
        for block in reader.blocks(BLOCK * workers.world, documents=document):
            first = reader.number - len(block) + 1
            if not document and not has_warned and DOCUMENT in block:
                has_warned = True
                log.warning(
                    "%s, line %d is %s, which is translated as text: only document translation "
                    "(--document) reads it as the start of a document",
                    reader.name,
                    first + block.index(DOCUMENT),
                    DOCUMENT,
                )
            for lines in workers.map(work, _units(block, first, document)):
                out.write("".join(f"{line}\n" for line in lines).encode())
            out.flush()
    return reader.number


@contextmanager
def open_source(path: Path | None) -> Iterator[BinaryIO]:
    """Open a text file (plain, .xz or .gz) for reading, or standard input if `path` is None."""
    if path is None:
        yield sys.stdin.buffer
    else:
        with open_text(path) as file:
            yield file


@contextmanager
def open_target(path: Path | None) -> Iterator[BinaryIO]:
    """Open a file that appears when the block succeeds, or standard output if `path` is None."""
    if path is None:
        yield sys.stdout.buffer
    else:
        with atomic_path(path) as partial, partial.open("wb") as file:
            yield file


def _units(block: list[str], first: int, documents: bool) -> list[Unit]:
    """Split a block, whose first line has number `first`, into units."""
    units: list[Unit] = []
    for number, line in enumerate(block, first):
        if not units or not documents or is_border(units[-1].lines[-1]):
            units.append(Unit([], []))
        units[-1].numbers.append(number)
        units[-1].lines.append(line)
    return units


def _translate_units(
    translator: LineTranslator, units: list[Unit], documents: bool
) -> list[list[str]]:
    numbers: list[int] = []
    lines: list[str] = []
    for unit in units:
        # A blank line after each unit keeps neighbouring documents apart.
        numbers += [*unit.numbers, unit.numbers[-1]]
        lines += [*unit.lines, ""]
    translated = iter(translator.lines(lines, together=documents, numbers=numbers))
    return [[next(translated) for _ in [*unit.lines, ""]][:-1] for unit in units]
