"""Progress: nothing for short work, plain lines without a terminal, a bar on a terminal."""

import io
import signal
import time
from importlib import import_module
from pathlib import Path

import pytest

from reluformer import console


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
        shown.update(5, 10, "working")
        shown.update(10, 10, "working")
    assert "working" in terminal.getvalue() and "10/10" in terminal.getvalue()


def test_unexpected_errors_keep_their_traceback() -> None:
    @console.guarded
    def broken() -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
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
