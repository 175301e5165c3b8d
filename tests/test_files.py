"""Atomic files and folders: complete or absent, leftovers recognisable, links and nodes kept."""

import errno
import itertools
import os
import stat
import threading
from pathlib import Path

import pytest

from reluformer import files
from reluformer.errors import UserError
from reluformer.files import (
    atomic_folder,
    atomic_path,
    check_folder,
    check_outputs,
    check_writable,
    remove_partials,
    sha256,
    write_json,
    write_text,
)


def test_a_file_is_complete_or_absent(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.txt"
    write_text(path, "ä\n")
    assert path.read_bytes() == "ä\n".encode()
    with pytest.raises(KeyboardInterrupt), atomic_path(path) as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text(encoding="utf-8") == "ä\n"
    assert [p.name for p in path.parent.iterdir()] == ["a.txt"]
    write_json(path, {"ö": [1]})
    assert path.read_text(encoding="utf-8") == '{\n  "ö": [\n    1\n  ]\n}\n'


def test_a_folder_is_replaced_completely_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    for content in ("first", "second"):
        with atomic_folder(folder) as partial:
            (partial / "inner").mkdir()
            (partial / "inner" / content).write_text(content)
            assert not (folder / "inner" / content).exists()
    assert [p.name for p in (folder / "inner").iterdir()] == ["second"]
    with pytest.raises(OSError, match="full"), atomic_folder(folder) as partial:
        (partial / "third").touch()
        raise OSError("disk full")
    assert [p.name for p in folder.iterdir()] == ["inner"]
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_write_errors_name_the_requested_path(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for atomic in (atomic_path, atomic_folder):
        with pytest.raises(OSError, match="No space left") as caught, atomic(path):
            raise OSError(errno.ENOSPC, "No space left")
        assert caught.value.filename == str(path)
        missing = (FileNotFoundError, NotADirectoryError)
        with pytest.raises(missing) as caught, atomic(path) as partial:
            (partial / "deep" / "er").write_text("")
        assert caught.value.filename == str(path)
        # Errors of other files keep their name.
        with pytest.raises(FileNotFoundError) as caught, atomic(path):
            (tmp_path / "other").read_text(encoding="utf-8")
        assert caught.value.filename == str(tmp_path / "other")


def test_leftovers_with_the_same_process_id_are_discarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_CALLS", itertools.count(7))
    old = tmp_path / f"f.{os.getpid()}.7.partial"
    old.mkdir()
    (old / "stale").touch()
    with atomic_folder(tmp_path / "f") as partial:
        (partial / "fresh").touch()
    assert [p.name for p in (tmp_path / "f").iterdir()] == ["fresh"]


def test_only_leftovers_are_removed(tmp_path: Path) -> None:
    for name in ("f.12.partial", "f.12.old.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").touch()
    for name in ("f", "f.txt", "g.3.partial", "f.long.4.partial"):
        (tmp_path / name).touch()
    removed = remove_partials(tmp_path, of="f")
    assert [p.name for p in removed] == ["f.12.old.partial", "f.12.partial"]
    assert {p.name for p in tmp_path.iterdir()} == {"f", "f.txt", "g.3.partial", "f.long.4.partial"}
    remove_partials(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"f", "f.txt"}
    assert remove_partials(tmp_path / "nowhere") == []


def test_checksum(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert sha256(tmp_path / "a").startswith("ba7816bf8f01cfea")


def test_a_symbolic_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    link, target = tmp_path / "link", tmp_path / "deep" / "target"
    link.symlink_to(Path("deep", "target"))
    for text in ("new", "replaced"):
        check_writable(link)
        write_text(link, text)
        assert link.is_symlink() and target.read_text() == text
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["target"]


def test_a_link_to_a_folder_stays(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "disk" / "folder")
    for name in ("first", "second"):
        with atomic_folder(link) as partial:
            (partial / name).touch()
        assert link.is_symlink()
        assert [path.name for path in (tmp_path / "disk" / "folder").iterdir()] == [name]


def test_a_fifo_is_written_into(tmp_path: Path) -> None:
    fifo, received = tmp_path / "fifo", []
    os.mkfifo(fifo)
    check_writable(fifo)
    reader = threading.Thread(target=lambda: received.append(fifo.read_text()))
    reader.start()
    write_text(fifo, "through the pipe")
    reader.join(timeout=10)
    assert received == ["through the pipe"]
    assert stat.S_ISFIFO(fifo.stat().st_mode) and len(list(tmp_path.iterdir())) == 1


def test_a_device_is_written_into(tmp_path: Path) -> None:
    (tmp_path / "null").symlink_to("/dev/null")
    for path in (Path("/dev/null"), tmp_path / "null"):
        check_writable(path)
        write_text(path, "nothing")
        assert stat.S_ISCHR(path.stat().st_mode)


def test_outputs_that_cannot_be_written_are_refused_beforehand(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused = {tmp_path: IsADirectoryError, tmp_path / "file" / "x": NotADirectoryError}
    for path, error in refused.items():
        for attempt in (check_writable, lambda path: write_text(path, "")):
            with pytest.raises(error) as caught:
                attempt(path)
            assert caught.value.filename == str(path)
    check_writable(tmp_path / "new" / "folders" / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with pytest.raises(NotADirectoryError), atomic_folder(tmp_path / "file"):
        pass
    assert (tmp_path / "file").is_file()


def test_a_link_with_the_name_of_the_temporary_file_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep")
    with atomic_path(tmp_path / "out") as partial:
        calls = int(partial.name.split(".")[2])
    for later in range(calls + 1, calls + 4):
        (tmp_path / f"out.{os.getpid()}.{later}.partial").symlink_to(precious)
    write_text(tmp_path / "out", "new")
    assert precious.read_text() == "keep" and (tmp_path / "out").read_text() == "new"


def test_threads_may_write_the_same_file(tmp_path: Path) -> None:
    path, texts = tmp_path / "out", [f"{i}" * 50_000 for i in range(8)]
    threads = [threading.Thread(target=write_text, args=(path, text)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text() in texts
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_replaced_folder_is_never_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    """A kill between two calls of the system leaves the old or the new folder."""
    folder = tmp_path / "f"
    folder.mkdir()
    (folder / "old").touch()
    replace, absent = os.replace, []

    def observed(source: Path, target: Path) -> None:
        replace(source, target)
        absent.append(not folder.exists())

    monkeypatch.setattr(os, "replace", observed)
    if not can_exchange:
        monkeypatch.setattr(files, "_exchange", lambda first, second: False)
    with atomic_folder(folder) as partial:
        (partial / "new").touch()
    assert [p.name for p in folder.iterdir()] == ["new"]
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
    # Without an exchange there is one such moment, because a rename cannot replace a folder.
    assert absent == ([] if can_exchange else [True, False])


def test_a_failed_replacement_puts_the_old_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    (folder / "old").touch()
    replace = os.replace

    def fails(source: Path, target: Path) -> None:
        if source.name.endswith(".partial") and ".old." not in source.name:
            raise OSError(errno.EIO, "Input/output error")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fails)
    monkeypatch.setattr(files, "_exchange", lambda first, second: False)
    with pytest.raises(OSError, match="Input/output"), atomic_folder(folder) as partial:
        (partial / "new").touch()
    assert [p.name for p in folder.iterdir()] == ["old"]


def test_every_output_needs_a_file_of_its_own(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("keep")
    (tmp_path / "link").symlink_to(text)
    new, null = tmp_path / "new", Path("/dev/null")
    check_outputs([new, None, null, null], [text, None])
    for outputs in ([text], [tmp_path / "link"], [tmp_path / "x/../text"], [new, new]):
        with pytest.raises(UserError, match="is used twice"):
            check_outputs(outputs, [text])
    assert text.read_text() == "keep" and not new.exists()


def test_folders_that_cannot_be_written_are_refused_beforehand(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    check_folder(tmp_path)
    check_folder(tmp_path / "new/folder")
    for path in (tmp_path / "file", tmp_path / "file/folder", tmp_path / "loop"):
        with pytest.raises(OSError) as caught:
            check_folder(path)
        assert caught.value.filename == str(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "loop"]


def test_a_replaced_file_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "private"
    path.write_text("old")
    path.chmod(0o600)
    with atomic_path(path) as partial:
        partial.write_text("new")
    assert path.read_text() == "new" and path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o700, 0o555])
def test_a_replaced_folder_keeps_its_permissions(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "private"
    folder.mkdir(mode)
    with atomic_folder(folder) as partial:
        (partial / "new").touch()
    assert (folder / "new").exists() and folder.stat().st_mode & 0o777 == mode | 0o700
