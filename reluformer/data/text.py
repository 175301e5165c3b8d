"""Aligned text files: one sentence per line, documents separated by `<d>` lines or blank lines.

Files are UTF-8, plain or compressed (.xz, .gz), and are streamed in constant memory. Only a newline
(or carriage return and newline) ends a line, so characters such as U+2028 or the form feed stay
inside their sentence. Errors name the file and the line.
"""

import gzip
import lzma
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, count, groupby, zip_longest
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from reluformer.errors import UserError
from reluformer.files import atomic_path

DOCUMENT = "<d>"
"""A line that starts a document."""

# Longer lines are refused, so that a file without newlines cannot fill the memory.
MAX_LINE_BYTES = 16 * 2**20


class TextPair(NamedTuple):
    """Two aligned text files and how to read them."""

    source: Path
    target: Path
    documents: bool | None = None
    """True if `<d>` lines and blank lines separate documents, False if they are skipped and every
    sentence is a document of its own, None to read documents if the file has such lines."""
    keys: Path | None = None
    """Table with one line for each `<d>` line. Consecutive documents whose first tab-separated
    fields are equal are read as one document."""


class Sentence(NamedTuple):
    """One aligned sentence pair."""

    source: str
    target: str
    document: int
    """Number of the document, the same for all its sentences."""


def decode_lines(file: BinaryIO, name: str) -> Iterator[str]:
    """Yield every line of an open binary file without its line end.

    `name` is the name of the file in error messages.
    """
    for number in count(1):
        raw = file.readline(MAX_LINE_BYTES + 1)
        if not raw:
            return
        if len(raw) > MAX_LINE_BYTES:
            raise UserError(f"{name}, line {number} is longer than {MAX_LINE_BYTES} bytes")
        if b"\0" in raw:
            raise UserError(f"{name}, line {number} has a NUL byte; text must be UTF-8")
        try:
            text = raw.decode("utf-8").removesuffix("\n").rstrip("\r")
        except UnicodeDecodeError as error:
            place = f"byte {raw[error.start]:#04x} at position {error.start + 1}"
            raise UserError(f"{name}, line {number} is not UTF-8: {place}") from None
        # A byte-order mark is not part of the text.
        yield text.lstrip("\ufeff") if number == 1 else text


def lines(path: Path | str) -> Iterator[str]:
    """Yield every line of the text file `path` (plain, .xz or .gz) without its line end."""
    path = Path(path)
    with open_text(path) as file, name_read_errors(str(path)):
        yield from decode_lines(file, str(path))


def open_text(path: Path) -> BinaryIO:
    """Open a text file (plain, .xz or .gz) for reading its uncompressed bytes."""
    with name_read_errors(str(path)):
        if path.suffix == ".xz":
            return cast(BinaryIO, lzma.open(path))
        if path.suffix == ".gz":
            return cast(BinaryIO, gzip.open(path))
        return path.open("rb")


@contextmanager
def name_read_errors(name: str) -> Iterator[None]:
    """Turn errors of reading or decompressing the file `name` into a `UserError` that names it."""
    try:
        yield
    except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UserError(f"{name} cannot be decompressed: {error}") from None
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror or error}") from None


def is_border(line: str) -> bool:
    """Whether a line separates documents: `<d>` or blank."""
    return bool(_border(line))


def has_documents(path: Path | str) -> bool:
    """Whether a text file has a `<d>` line or a blank line; reads up to the first."""
    return any(map(is_border, lines(path)))


def read_sentences(files: TextPair) -> Iterator[Sentence]:
    """Yield the aligned sentences of two files, in order, with their document numbers."""
    documents = has_documents(files.source) if files.documents is None else files.documents
    groups = _MergedDocuments(files) if documents and files.keys is not None else None
    document = 0
    both = zip_longest(lines(files.source), lines(files.target))
    for number, (source, target) in enumerate(both, 1):
        if source is None or target is None:
            raise UserError(_length_mismatch(files, number, target is None))
        border = _border(source)
        if border != _border(target):
            raise UserError(
                f"line {number} is {border or 'a sentence'} in {files.source} but "
                f"{_border(target) or 'a sentence'} in {files.target}; aligned files have "
                f"sentences, {DOCUMENT} lines and blank lines in the same places"
            )
        if groups is not None:
            document = groups.document(number, border)
        elif border or not documents:
            document += 1
        if not border:
            yield Sentence(source, target, document)
    if groups is not None:
        groups.close()


def read_documents(files: TextPair) -> Iterator[list[tuple[str, str]]]:
    """Yield the documents of two aligned files as lists of (source, target), one at a time."""
    for _, sentences in groupby(read_sentences(files), key=lambda sentence: sentence.document):
        yield [(sentence.source, sentence.target) for sentence in sentences]


def write_documents(
    source: Path, target: Path, documents: Iterable[Iterable[tuple[str, str]]], *, marked: bool
) -> None:
    """Write aligned text files, atomically; with `marked`, a `<d>` line starts each document."""
    with (
        atomic_path(source) as source_path,
        atomic_path(target) as target_path,
        source_path.open("w", encoding="utf-8", newline="\n") as source_file,
        target_path.open("w", encoding="utf-8", newline="\n") as target_file,
    ):
        for document in documents:
            for pair in chain([(DOCUMENT, DOCUMENT)] if marked else [], document):
                source_file.write(f"{pair[0]}\n")
                target_file.write(f"{pair[1]}\n")


class _MergedDocuments:
    """Document numbers when consecutive documents with equal keys are one document."""

    def __init__(self, files: TextPair) -> None:
        assert files.keys is not None
        self._files = files
        self._keys = (line.split("\t", 1)[0] for line in lines(files.keys))
        self._key: str | None = None
        self._document = 0

    def document(self, number: int, border: str) -> int:
        """Number of the document that line `number` belongs to."""
        if border == DOCUMENT:
            key = next(self._keys, None)
            if key is None:
                raise UserError(
                    f"{self._files.keys} has no line for the document that starts in line {number} "
                    f"of {self._files.source}"
                )
            self._document += key != self._key
            self._key = key
        elif not border and self._key is None:
            raise UserError(
                f"{self._files.source}, line {number} comes before the first {DOCUMENT}"
            )
        return self._document

    def close(self) -> None:
        """Check that every line of the table was used."""
        if next(self._keys, None) is not None:
            raise UserError(
                f"{self._files.keys} has more lines than {self._files.source} has documents"
            )


def _border(line: str) -> str:
    """Kind of a line that separates documents, "<d>" or "blank"; "" for a sentence."""
    stripped = line.strip()
    if not stripped:
        return "blank"
    return DOCUMENT if stripped == DOCUMENT else ""


def _length_mismatch(files: TextPair, number: int, target_ended: bool) -> str:
    shorter, longer = files.target, files.source
    if not target_ended:
        shorter, longer = longer, shorter
    return f"{shorter} ends after line {number - 1} but {longer} goes on"
