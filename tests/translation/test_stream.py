"""Streams: lines as they arrive, invalid bytes, compressed files."""

import gzip
import io
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reluformer.data.text import open_text
from reluformer.errors import UserError
from reluformer.translation.line_reader import LineReader
from reluformer.translation.stream import translate_stream


class Upper:
    """Replaces the translator: upper case."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def lines(self, lines, *, together=False, numbers=None):
        assert len(numbers) == len(lines)
        self.calls.append(list(lines))
        return [line.upper() for line in lines]


def translate(data: bytes, document: bool = False) -> bytes:
    out = io.BytesIO()
    count = translate_stream(Upper(), LineReader(io.BytesIO(data), "input"), out, document=document)
    assert count == out.getvalue().count(b"\n")
    return out.getvalue()


@pytest.mark.parametrize("document", [False, True])
def test_one_output_line_per_input_line(document: bool) -> None:
    assert translate(b"", document) == b""
    assert translate(b"\n", document) == b"\n"
    assert translate(b"a\n\nb", document) == b"A\n\nB\n"
    assert translate(b"\xef\xbb\xbfa\r\nb\r\n", document) == b"A\nB\n"
    assert translate(b"a\x0cb\xe2\x80\xa8c\n", document) == b"A\x0cB\xe2\x80\xa8C\n"


def test_invalid_bytes_are_replaced_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert translate(b"a\nb\xff\n\xff\n") == "A\nB\ufffd\n\ufffd\n".encode()
    assert len(caplog.records) == 1 and "line 2" in caplog.text
    caplog.clear()
    assert translate("\ufffd\0\n".encode()) == "\ufffd\0\n".encode()
    assert not caplog.records


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_preserve_the_number_of_lines(data: bytes, document: bool) -> None:
    expected = data.count(b"\n") + (not data.endswith(b"\n") and bool(data))
    assert translate(data, document).count(b"\n") == expected


def test_blocks_do_not_split_documents() -> None:
    lines = [f"line {i}" if i % 97 else "<d>" for i in range(1, 3000)]
    reader = LineReader(io.BytesIO("\n".join(lines).encode()), "input")
    blocks = list(reader.blocks(100, documents=True))
    assert [line for block in blocks for line in block] == lines
    assert all(block[-1] == "<d>" for block in blocks[:-1])
    assert max(map(len, blocks)) <= 200


def test_an_endless_line_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reluformer.translation.line_reader.MAX_LINE_BYTES", 100)
    monkeypatch.setattr("reluformer.translation.line_reader._CHUNK", 16)
    with pytest.raises(UserError, match="line 2"):
        translate(b"a\n" + b"x" * 200)


def test_a_silent_pipe_gets_its_translations() -> None:
    """A program may wait for each translation before it writes the next line."""
    read, write = os.pipe()
    answers: list[str] = []
    with os.fdopen(read, "rb") as source:
        blocks = LineReader(source, "pipe").blocks(100)
        thread = threading.Thread(target=lambda: answers.extend(line for b in blocks for line in b))
        thread.start()
        for text in ("one", "two"):
            os.write(write, f"{text}\n".encode())
            deadline = time.monotonic() + 10
            while text not in answers and time.monotonic() < deadline:
                time.sleep(0.01)
            assert answers[-1] == text
        os.write(write, b"three")
        os.close(write)
        thread.join()
    assert answers == ["one", "two", "three"]


def test_compressed_files(tmp_path: Path) -> None:
    path = tmp_path / "text.gz"
    path.write_bytes(gzip.compress(b"a\nb\n"))
    with open_text(path) as file:
        assert list(LineReader(file, "text").blocks(9)) == [["a", "b"]]
    path.write_bytes(gzip.compress(b"a\nb\n" * 9000)[:-20])
    with open_text(path) as file, pytest.raises(UserError, match="decompressed"):
        list(LineReader(file, "text").blocks(9))
    with pytest.raises(UserError, match="cannot be read"):
        open_text(tmp_path / "none")


def test_document_marks_without_documents_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    assert translate(b"a\n<d>\nb\n<d>\n") == b"A\n<D>\nB\n<D>\n"
    assert len(caplog.records) == 1 and "input, line 2 is <d>" in caplog.text
    caplog.clear()
    translate(b"a\n<d>\nb\n", document=True)
    assert not caplog.records


def test_a_document_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reluformer.translation.line_reader._MOST_CHARACTERS", 100)
    with pytest.raises(UserError, match="input, line 34 is in a document of more than 100 char"):
        translate(b"abc\n" * 50, document=True)
    assert translate(b"abc\n\n" * 50, document=True) == b"ABC\n\n" * 50


def test_an_interruption_that_another_thread_receives_is_not_lost() -> None:
    code = """
import os, signal, threading, time
from reluformer.translation.line_reader import LineReader

def interrupt():
    time.sleep(0.3)
    # Python runs handlers in the main thread, which this does not wake.
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
reading, writing = os.pipe()
threading.Thread(target=interrupt).start()
try:
    next(LineReader(os.fdopen(reading, "rb"), "pipe").blocks(1))
except KeyboardInterrupt:
    os._exit(130)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=60)
    assert done.returncode == 130
