"""Progress: nothing for short work, plain lines without a terminal, a bar on a terminal."""

import io
import signal
import time
from importlib import import_module
from pathlib import Path

import pytest
import torch

from reluformer import console
from reluformer.errors import Diverged, UserError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    return now


def test_short_work_shows_nothing(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with console.progress("lines") as shown:
        clock[0] += 1.9
        shown.update(5, 10, "working")
    assert capsys.readouterr() == ("", "")


def test_plain_lines_at_intervals_without_a_terminal(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with console.progress("lines") as shown:
        for second in range(40):
            shown.update(1000 * second, None if second < 20 else 50_000, "working")
            clock[0] += 1
    assert capsys.readouterr().err.splitlines() == [
        "working: 2,000 lines",
        "working: 17,000 lines",
        "working: 32,000 of 50,000 lines",
    ]


def test_a_bar_on_a_terminal_is_removed(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with console.progress("lines") as shown:
        clock[0] += 3
        shown.update(5, 10, "reading a[/b]")
        shown.update(10, 10, "reading a[/b]")
    assert "reading a[/b]" in terminal.getvalue() and "10/10" in terminal.getvalue()


TABLE = (
    "Memories",
    ["memory, values", "dev nll", "difference (95 %)"],
    [["softmax_ln, alike", "2.695", "+1.04 (-2.45 to +2.90), p = 0.588"], ["relu", "2.680"]],
)


def test_tables_wrap_between_words_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    console.print_table(*TABLE)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 50
    assert lines[0] == "Memories" and lines[-1] == ""
    shown = " ".join(lines)
    assert all(text in shown for text in ("softmax_ln, alike", "+1.04", "(-2.45", "0.588"))


def test_tables_that_cannot_fit_keep_their_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    console.print_table(*TABLE)
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("softmax_ln, alike", "difference", "+2.90),"))


def test_tables_in_files_are_not_wrapped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    console.print_table(*TABLE)
    assert "+1.04 (-2.45 to +2.90), p = 0.588" in capsys.readouterr().out


def test_definitions_are_indented_below_their_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = {"a": "first and second", "long": "third"}
    monkeypatch.setenv("COLUMNS", "16")
    console.print_definitions(texts)
    assert capsys.readouterr().out == "a     first and\n      second\nlong  third\n"
    monkeypatch.delenv("COLUMNS")
    console.print_definitions(texts)
    assert capsys.readouterr().out == "a     first and second\nlong  third\n"


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (RuntimeError("a\nbug"), 1, "unexpected RuntimeError: a bug; this is a bug"),
        (RecursionError(), 1, "unexpected RecursionError: no message"),
        (OverflowError("int too large"), 1, "unexpected OverflowError: int too large"),
        (MemoryError(), 1, "out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory"), 1, "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 1, "out of memory"),
        (UserError("beam must be 1"), 2, "beam must be 1"),
        (OSError(13, "Permission denied", "x"), 2, "x cannot be used: Permission denied"),
        (Diverged(3, "NaN", {}), 3, "training diverged by step 3: NaN"),
        (type("PanicException", (BaseException,), {})("in Rust"), 1, "unexpected PanicException"),
    ],
)
def test_every_failure_is_one_line_and_a_status(
    error: BaseException,
    status: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @console.guarded
    def broken() -> None:
        raise error

    with pytest.raises(SystemExit) as caught:
        broken()
    assert caught.value.code == status
    printed = capsys.readouterr().err
    assert printed.startswith(f"reluformer: {message}") and printed.count("\n") == 1
    monkeypatch.setenv("RELUFORMER_DEBUG", "1")
    with pytest.raises(type(error)):
        broken()


def test_an_interruption_during_an_import_takes_effect_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "interrupted_module.py").write_text(
        "import signal\n"
        "try:\n    signal.raise_signal(signal.SIGINT)\n"
        "except BaseException:\n    pass\n"
        "finished = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    signal.signal(signal.SIGINT, signal.default_int_handler)

    @console.guarded
    def command() -> None:
        assert import_module("interrupted_module").finished
        time.sleep(10)

    with pytest.raises(SystemExit) as caught:
        command()
    assert caught.value.code == console.INTERRUPTED
    assert capsys.readouterr().err == "reluformer: interrupted\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interruption_during_the_last_import_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "last_module.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    monkeypatch.syspath_prepend(tmp_path)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(SystemExit) as caught:
        console.guarded(lambda: import_module("last_module"))()
    assert caught.value.code == console.INTERRUPTED
    # Nothing is delivered later, for example while Python exits.
    time.sleep(0.2)
    assert capsys.readouterr().err == "reluformer: interrupted\n"


def test_names_of_a_wide_table_stay_on_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    columns = ["layer.head", "sum", "entropy", "zeros", "dead rows", "dead keys", "cosine", "top %"]
    row = ["encoder 0.0", "0.835", "3.795", "100.0%", "100.0%", "100.0%", "0.177", "12.5%"]
    console.print_table("Attention", columns, [row, ["cross 0.1", *row[1:]]])
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    (line,) = [line for line in lines if "encoder 0.0" in line]
    assert all(value in line for value in row)


def test_cells_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["out[v2].de", "a[/b].de", "c:100:.de", "日本語.de"]
    console.print_table("", ["score", *names], [["BLEU", *names]])
    header, _, row, *_ = capsys.readouterr().out.splitlines()
    assert header.split() == ["score", *names] and row.split() == ["BLEU", *names]
