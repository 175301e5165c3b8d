"""A terminated process (SIGTERM) removes what it is writing, and ends by the signal."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from reluformer.files import atomic_folder, atomic_path
from reluformer.termination import removed_on_termination

ROOT = Path(__file__).parents[1]

START = """
import os, signal, sys, threading
from pathlib import Path
from reluformer.files import atomic_folder, atomic_path

folder = Path(sys.argv[1])

def terminate():
    os.kill(os.getpid(), signal.SIGTERM)

# Child processes inherit ignored signals.
signal.signal(signal.SIGTERM, signal.SIG_DFL)
"""


def run(code: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run code of a process that terminates itself, in `folder`."""
    return subprocess.run(
        [sys.executable, "-c", START + code, str(folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize(
    "code",
    [
        "with atomic_path(folder / 'f'):\n    terminate()",
        "with atomic_path(folder / 'f') as half:\n    half.write_text('half')\n    terminate()",
        "with atomic_path(folder / 'f') as a, atomic_path(folder / 'g') as b:\n    terminate()",
        "with atomic_folder(folder / 'd') as partial:\n"
        "    (partial / 'deep').mkdir()\n"
        "    (partial / 'deep' / 'half').touch()\n"
        "    with atomic_path(folder / 'd' / 'g'):\n"
        "        terminate()",
        # The inner block must not put the default handler back.
        "with atomic_path(folder / 'f'):\n"
        "    with atomic_path(folder / 'd' / 'kept'):\n"
        "        pass\n"
        "    terminate()",
        # A program may catch everything that Python raises.
        "with atomic_path(folder / 'f'):\n"
        "    try:\n"
        "        terminate()\n"
        "    except BaseException:\n"
        "        print('caught')",
    ],
)
def test_what_is_being_written_is_removed(code: str, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "kept").write_text("old")
    (tmp_path / "h.7.1.partial").write_text("of another process")
    done = run(code, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGTERM, "", "")
    names = {path.name for path in tmp_path.rglob("*")}
    assert names == {"d", "kept", "h.7.1.partial"}


def test_files_of_other_threads_are_removed_while_the_main_thread_writes(tmp_path: Path) -> None:
    code = """
def write():
    with atomic_path(folder / "g"):
        is_writing.set()
        threading.Event().wait()

is_writing = threading.Event()
with atomic_path(folder / "f"):
    threading.Thread(target=write, daemon=True).start()
    is_writing.wait()
    terminate()
"""
    assert run(code, tmp_path).returncode == -signal.SIGTERM
    assert not list(tmp_path.iterdir())


def test_a_terminated_child_leaves_the_files_of_its_parent(tmp_path: Path) -> None:
    code = """
with atomic_path(folder / "f") as partial:
    child = os.fork()
    if not child:
        terminate()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    partial.write_text("whole")
"""
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
    assert (tmp_path / "f").read_text() == "whole"


def test_a_handler_of_the_program_stays(tmp_path: Path) -> None:
    code = """
signal.signal(signal.SIGTERM, lambda *_: print("handled"))
with atomic_path(folder / "f") as partial:
    terminate()
with atomic_path(folder / "g") as partial:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    terminate()
assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
"""
    done = run(code, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "handled\n", "")
    assert {path.name for path in tmp_path.iterdir()} == {"f", "g"}


def test_the_default_returns_after_the_block(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    for atomic in (atomic_path, atomic_folder):
        with pytest.raises(ValueError, match="stop"), atomic(tmp_path / "a"):
            raise ValueError("stop")
        assert signal.getsignal(signal.SIGTERM) is before
    assert not list(tmp_path.iterdir())


def test_the_first_process_of_a_container_goes_on(tmp_path: Path) -> None:
    code = """
os.getpid = lambda: 1
with atomic_path(folder / "f"):
    print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
"""
    assert run(code, tmp_path).stdout == "True\n"


def test_other_threads_do_not_touch_the_handler(tmp_path: Path) -> None:
    found = []

    def write() -> None:
        with removed_on_termination(tmp_path / "a"):
            found.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert found == [before]
