"""AttentionRecord aligned text: one sentence a line, documents between `<d>` lines or blank lines.

Files are UTF-8, plain or compressed (.xz, .gz), and are streamed: memory does not grow with them.
Lines end with a newline (or carriage return and newline) and with nothing else, so characters such
as U+2028 or the form feed stay inside their sentence. What cannot be read is named by file and
line.
"""

import gzip
import lzma
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain, count, groupby, zip_longest
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from reluformer.errors import UserError
from reluformer.files import atomic_path

# Starts a document when alone on a line.
DOCUMENT = "<d>"
# Longer lines are refused, so that a file without newlines cannot fill the memory.
MAX_LINE_BYTES = 16 * 2**20


class TextPair(NamedTuple):
    """Two aligned text files and how to read them.

    `documents` says whether `<d>` lines and blank lines separate documents (True) or are skipped
    and every sentence stands alone (False); None looks whether there are any. `keys` is a table
    with one line for each `<d>`: neighbouring documents whose first tab-separated field is the
    same are read as one.
    """

    source: Path
    target: Path
    documents: bool | None = None
    keys: Path | None = None


class Sentence(NamedTuple):
    """One aligned pair; the sentences of one document share the number `document`."""

    source: str
    target: str
    document: int


def decode_lines(file: BinaryIO, name: str) -> Iterator[str]:
    """Yield every line of an open binary file without its end; `name` stands for it in messages."""
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
        # A byte-order mark is no text.
        yield text.lstrip("\ufeff") if number == 1 else text


def lines(path: Path | str) -> Iterator[str]:
    """Yield every line of the text file `path` (plain, .xz or .gz) without its end."""
    path = Path(path)
    try:
        with _open(path) as file:
            yield from decode_lines(file, str(path))
    except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UserError(f"{path} cannot be decompressed: {error}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None


def has_documents(path: Path | str) -> bool:
    """Whether a text file has any `<d>` line or blank line; reads up to the first."""
    return any(_border(line) for line in lines(path))


def read_sentences(files: TextPair) -> Iterator[Sentence]:
    """Yield the aligned sentences of two files, in order, with their document numbers."""
    documents = has_documents(files.source) if files.documents is None else files.documents
    groups = _Groups(files) if documents and files.keys is not None else None
    document = 0
    both = zip_longest(lines(files.source), lines(files.target))
    for number, (source, target) in enumerate(both, 1):
        if source is None or target is None:
            raise UserError(_ended(files, number, target is None))
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


def read_texts(path: Path | str, documents: bool | None = None) -> Iterator[list[str]]:
    """Yield the documents of one text file as lists of sentences; `documents` as in `TextPair`."""
    if documents is None:
        documents = has_documents(path)
    document: list[str] = []
    for line in lines(path):
        border = _border(line)
        if not border:
            document.append(line)
        if document and (border or not documents):
            yield document
            document = []
    if document:
        yield document


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


class _Groups:
    """Follows the `<d>` lines of a file through the table of keys beside it."""

    def __init__(self, files: TextPair) -> None:
        assert files.keys is not None
        self._files = files
        self._keys = (line.split("\t", 1)[0] for line in lines(files.keys))
        self._key: str | None = None
        self._document = 0

    def document(self, number: int, border: str) -> int:
        """The number of the document that the line belongs to."""
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
        """Make sure that every line of the table was used."""
        if next(self._keys, None) is not None:
            raise UserError(
                f"{self._files.keys} has more lines than {self._files.source} has documents"
            )


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".xz":
        return cast(BinaryIO, lzma.open(path))
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path))
    return path.open("rb")


def _border(line: str) -> str:
    """What separates documents in `line`: "<d>", "blank", or "" when it is a sentence."""
    stripped = line.strip()
    if not stripped:
        return "blank"
    return DOCUMENT if stripped == DOCUMENT else ""


def _ended(files: TextPair, number: int, target_ended: bool) -> str:
    shorter, longer = files.target, files.source
    if not target_ended:
        shorter, longer = longer, shorter
    return f"{shorter} ends after line {number - 1} but {longer} goes on"
