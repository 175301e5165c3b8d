"""Lines of a byte stream in blocks, without waiting for lines that have not arrived yet."""

import io
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import BinaryIO, cast

from reluformer.data.text import MAX_LINE_BYTES, is_border, name_read_errors
from reluformer.errors import UserError

log = logging.getLogger("reluformer")

_CHUNK = 2**20
# A longer document has no end, and would fill the memory.
_MOST_CHARACTERS = 2**26
# Chunks read ahead of the translation.
_QUEUED_CHUNKS = 4
# Seconds that a pipe may be silent before the lines that have arrived are translated.
_PATIENCE = 0.05
# Seconds between wake-ups of a silent pipe: an interruption that arrives at the moment at which the
# main thread starts to wait does not end the wait.
_POLL = 0.5


class LineReader:
    """Lines of a binary stream, in blocks of the lines that have arrived.

    Only a newline ends a line. Bytes that are not UTF-8 become U+FFFD, with a warning. The stream
    is read by a thread, which starts with the first block, so that files, pipes and terminals are
    treated alike.

    Attributes:
        name: Name of the stream in messages.
        number: Number of the last line that was returned, from 1.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.name, self.number = name, 0
        # A buffered file that is garbage-collected closes the raw file beneath it.
        self._file = file
        self._chunks: queue.Queue[bytes | Exception] = queue.Queue(_QUEUED_CHUNKS)
        self._thread: threading.Thread | None = None
        self._lines: deque[bytes] = deque()
        self._rest, self._ended, self._warned = b"", False, False

    def blocks(self, size: int, *, documents: bool = False) -> Iterator[list[str]]:
        """Yield blocks of about `size` lines, or fewer when no more have arrived.

        With `documents`, a block ends with a line that separates documents, or with the stream.
        """
        while block := self._block(size, documents):
            yield block

    def _block(self, size: int, documents: bool) -> list[str]:
        block: list[str] = []
        characters = 0
        while True:
            is_whole = not documents or (bool(block) and is_border(block[-1]))
            if block and is_whole and (len(block) >= size or not self._has_line(_PATIENCE)):
                return block
            if not self._has_line(None):
                return block
            block.append(self._decode(self._lines.popleft()))
            characters = 0 if is_border(block[-1]) else characters + len(block[-1])
            if documents and characters > _MOST_CHARACTERS:
                raise UserError(
                    f"{self.name}, line {self.number} is in a document of more than "
                    f"{_MOST_CHARACTERS:,} characters; separate documents by <d> lines"
                )

    def _has_line(self, patience: float | None) -> bool:
        """Whether a complete line has arrived, or arrives within `patience` seconds; None waits."""
        while not self._lines and not self._ended:
            try:
                self._split(self._next_chunk(patience))
            except queue.Empty:
                return False
        return bool(self._lines)

    def _next_chunk(self, patience: float | None) -> bytes:
        """Bytes as they were read, b"" at the end of the stream."""
        if self._thread is None:
            # A daemon: a thread that waits for a terminal or a pipe does not delay the exit.
            arguments = (_unlocked_read(self._file), self._chunks)
            self._thread = threading.Thread(target=_read_ahead, args=arguments, daemon=True)
            self._thread.start()
        while True:
            try:
                chunk = self._chunks.get(timeout=_POLL if patience is None else patience)
                break
            except queue.Empty:
                if patience is not None:
                    raise
        with name_read_errors(self.name):
            if isinstance(chunk, Exception):
                raise chunk
        return chunk

    def _split(self, chunk: bytes) -> None:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if not chunk:
            self._ended = True
            lines += [self._rest] if self._rest else []
        if len(self._rest) > MAX_LINE_BYTES:
            number = self.number + len(self._lines) + len(lines) + 1
            raise UserError(f"{self.name}, line {number} is longer than {MAX_LINE_BYTES} bytes")
        self._lines.extend(lines)

    def _decode(self, raw: bytes) -> str:
        self.number += 1
        if self.number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        text = raw.removesuffix(b"\r").decode("utf-8", errors="replace")
        if "\ufffd" in text and not self._warned and "\ufffd".encode() not in raw:
            self._warned = True
            log.warning(
                "%s, line %d is not UTF-8; invalid bytes are replaced by U+FFFD",
                self.name,
                self.number,
            )
        return text


def _read_ahead(read: Callable[[int], bytes], chunks: "queue.Queue[bytes | Exception]") -> None:
    """Put chunks of a stream into the queue: b"" last, or the error that ended the stream."""
    try:
        while chunk := read(_CHUNK):
            chunks.put(chunk)
        chunks.put(b"")
    except Exception as error:
        chunks.put(error)


def _unlocked_read(file: BinaryIO) -> Callable[[int], bytes]:
    """A function that returns the bytes that have arrived, and waits only if there are none."""
    if isinstance(file, io.BufferedReader):
        # The buffer's lock would be held while the thread waits; Python aborts at exit when it
        # finds the lock of standard input held by a daemon thread.
        raw = cast(io.RawIOBase, file.raw)
        return lambda size: raw.read(size) or b""
    return cast(io.BufferedIOBase, file).read1
