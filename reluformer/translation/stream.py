"""Translating streams of lines: files, or standard input as it arrives, on one process or many."""

import gzip
import io
import logging
import lzma
import select
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import torch.distributed as dist

from reluformer.data.text import DOCUMENT, MAX_LINE_BYTES
from reluformer.errors import UserError
from reluformer.files import atomic_path
from reluformer.processes import processes
from reluformer.translation.translator import Translator

log = logging.getLogger("reluformer")

Item = tuple[list[int], list[str]]
"""Lines that belong together, with their numbers: a line, or a document and the line after it."""

# Lines translated at once, if so many have arrived: enough to find some of similar lengths.
BLOCK = 256
_CHUNK = 2**20
# How long a pipe may be silent before what has arrived is translated.
_PATIENCE = 0.05


class LineReader:
    """Lines of a binary stream in blocks, without waiting for more than has arrived.

    Lines end with a newline and with nothing else. Bytes that are not UTF-8 become U+FFFD, with a
    warning.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.name, self.number = name, 0
        """Number of the last line that was handed out."""
        # A buffered file that nothing refers to closes what is beneath it.
        self._file = file
        self._read, self._ready = _access(file)
        self._lines: deque[bytes] = deque()
        self._rest, self._ended, self._warned = b"", False, False

    def blocks(self, size: int, *, documents: bool = False) -> Iterator[list[str]]:
        """Yield blocks of about `size` lines, or less at a time when no more have arrived.

        With `documents` a block ends with a border, or with the stream.
        """
        while block := self._block(size, documents):
            yield block

    def _block(self, size: int, documents: bool) -> list[str]:
        taken: list[str] = []
        while True:
            whole = not documents or (bool(taken) and is_border(taken[-1]))
            if taken and whole and (len(taken) >= size or not (self._lines or self._more())):
                return taken
            if not self._lines and not self._fill():
                return taken
            if self._lines:
                taken.append(self._decode(self._lines.popleft()))

    def _more(self) -> bool:
        return not self._ended and self._ready()

    def _fill(self) -> bool:
        """Read what there is, waiting for it; False at the end of the stream."""
        if self._ended:
            return False
        try:
            data = self._read(_CHUNK)
        except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise UserError(f"{self.name} cannot be decompressed: {error}") from None
        except OSError as error:
            raise UserError(f"{self.name} cannot be read: {error.strerror or error}") from None
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data:
            self._ended = True
            lines += [self._rest] if self._rest else []
        if len(self._rest) > MAX_LINE_BYTES:
            number = self.number + len(self._lines) + len(lines) + 1
            raise UserError(f"{self.name}, line {number} is longer than {MAX_LINE_BYTES} bytes")
        self._lines.extend(lines)
        return bool(data or lines)

    def _decode(self, raw: bytes) -> str:
        self.number += 1
        if self.number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        text = raw.removesuffix(b"\r").decode("utf-8", errors="replace")
        if "\ufffd" in text and not self._warned and "\ufffd".encode() not in raw:
            self._warned = True
            log.warning(
                "%s, line %d is not UTF-8; its bad bytes count as U+FFFD", self.name, self.number
            )
        return text


def is_border(line: str) -> bool:
    """Whether a line separates documents."""
    return line.strip() in ("", DOCUMENT)


def translate_file(
    translator: Translator, path: Path, output: Path, *, document: bool = False
) -> int:
    """Translate the lines of one file into another; return the number of lines."""
    with source(path) as file, target(output) as out:
        return translate_stream(translator, LineReader(file, str(path)), out, document=document)


def translate_stream(
    translator: Translator,
    reader: LineReader,
    out: BinaryIO,
    *,
    document: bool = False,
    peers: "Peers | None" = None,
) -> int:
    """Translate line by line from `reader` to `out`; return the number of lines.

    With `peers`, every process calls this, but only the first reads and writes.
    """
    peers = Peers() if peers is None else peers

    def work(items: list[Item]) -> list[list[str]]:
        return _translate_items(translator, items, document)

    if peers.rank:
        peers.follow(work)
        return 0
    with peers.leading():
        for block in reader.blocks(BLOCK * peers.world, documents=document):
            first = reader.number - len(block) + 1
            items = _items(block, first, document)
            for lines in peers.map(work, items):
                out.write("".join(f"{line}\n" for line in lines).encode())
            out.flush()
    return reader.number


class Peers:
    """The processes that share the work; by default this one alone."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        """Take part as process `rank` of `world`, in a group that is already joined."""
        self.rank, self.world = rank, world
        # Objects travel between processors, whatever the devices use among themselves.
        self._group: Any = dist.new_group(backend="gloo") if world > 1 else None

    def map(
        self, work: Callable[[list[Item]], list[list[str]]], items: list[Item]
    ) -> list[list[str]]:
        """`work` of all items, long and short ones dealt evenly to the processes."""
        if self.world == 1:
            return work(items)
        order = sorted(range(len(items)), key=lambda i: -sum(map(len, items[i][1])))
        hands = [order[rank :: self.world] for rank in range(self.world)]
        mine = self._scatter([[items[index] for index in hand] for hand in hands])
        gathered: list[Any] = [None] * self.world
        dist.gather_object(work(mine), gathered, group=self._group)
        found = {
            i: lines
            for hand, part in zip(hands, gathered, strict=True)
            for i, lines in zip(hand, part, strict=True)
        }
        return [found[index] for index in range(len(items))]

    def follow(self, work: Callable[[list[Item]], list[list[str]]]) -> None:
        """Work for the first process until it has no more."""
        while (items := self._scatter(None)) is not None:
            dist.gather_object(work(items), None, group=self._group)

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Around all work of the first process: at the end the others are sent home."""
        yield
        if self.world > 1:
            self._scatter([None] * self.world)

    def _scatter(self, parts: list[Any] | None) -> Any:
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, parts, group=self._group)
        return mine[0]


def _items(block: list[str], first: int, documents: bool) -> list[Item]:
    items: list[Item] = []
    for number, line in enumerate(block, first):
        if not items or not documents or is_border(items[-1][1][-1]):
            items.append(([], []))
        items[-1][0].append(number)
        items[-1][1].append(line)
    return items


def _translate_items(translator: Translator, items: list[Item], documents: bool) -> list[list[str]]:
    numbers: list[int] = []
    lines: list[str] = []
    for item_numbers, item_lines in items:
        # A blank line after each keeps documents apart, whoever its neighbour is.
        numbers += [*item_numbers, item_numbers[-1]]
        lines += [*item_lines, ""]
    translated = iter(translator.lines(lines, together=documents, numbers=numbers))
    return [[next(translated) for _ in [*item_lines, ""]][:-1] for _, item_lines in items]


def opened(path: Path) -> BinaryIO:
    """A text file for record bytes, uncompressed if it ends in .xz or .gz."""
    compressed: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open}
    opening = compressed.get(path.suffix, open)
    try:
        return cast(BinaryIO, opening(path, "rb"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None


@contextmanager
def source(path: Path | None) -> Iterator[BinaryIO]:
    """A file to read, or standard input."""
    if path is None:
        yield sys.stdin.buffer
    else:
        with opened(path) as file:
            yield file


@contextmanager
def target(path: Path | None) -> Iterator[BinaryIO]:
    """A file that appears when all is written, or standard output."""
    if path is None:
        yield sys.stdout.buffer
    else:
        with atomic_path(path) as partial, partial.open("wb") as file:
            yield file


@contextmanager
def joined(device: Literal["cpu", "cuda"] | None) -> "Iterator[Peers]":
    """This process among those that torchrun started, or alone."""
    with processes(device) as group:
        yield Peers(group.rank, group.world)


def _access(file: BinaryIO) -> tuple[Callable[[int], bytes], Callable[[], bool]]:
    """How to read what has arrived, and how to ask whether anything has."""
    if not isinstance(file, io.BufferedReader):
        return file.read, lambda: True
    # A buffer would hide from `select` what it already holds.
    raw = cast(io.RawIOBase, file.raw)

    def ready() -> bool:
        try:
            return bool(select.select([raw], [], [], _PATIENCE)[0])
        except (OSError, ValueError):
            # Some systems can only ask sockets.
            return True

    return lambda size: raw.read(size) or b"", ready
