"""Atomic writes: a file or folder is either whole or not there."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PARTIAL = ".partial"


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path in `path`'s folder; move it onto `path` when the block succeeds.

    The temporary name ends in `.partial`, so leftovers of a killed process are recognisable.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
    with _errors_name(path, partial):
        try:
            yield partial
            _sync_file(partial)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    _sync_folder(path.parent)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `path`; move it onto `path` when the block succeeds.

    What was at `path` before is replaced. A killed process leaves only a `.partial` folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
    replaced = path.with_name(f"{path.name}.{os.getpid()}.old{PARTIAL}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with _errors_name(path, partial):
            partial.mkdir()
            yield partial
            for folder, _, names in os.walk(partial):
                for name in names:
                    _sync_file(Path(folder, name))
                _sync_folder(Path(folder))
            if path.exists():
                # A folder cannot replace a full one: move it aside first.
                os.replace(path, replaced)
            os.replace(partial, path)
        _sync_folder(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def _errors_name(path: Path, partial: Path) -> Iterator[None]:
    """Errors of writing name `path`, not its temporary name, and not nothing, as on a full disk."""
    try:
        yield
    except OSError as error:
        unnamed = error.filename is None and error.errno is not None
        if unnamed or str(error.filename).startswith(str(partial)):
            error.filename = str(path)
        raise


def sha256(path: Path) -> str:
    """Checksum of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8, atomically."""
    with atomic_path(path) as partial:
        partial.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def remove_partials(folder: Path, of: str | None = None) -> list[Path]:
    """Delete the leftovers of killed writers directly inside `folder`; return what was deleted.

    With `of`, only leftovers of the file or folder of that name.
    """
    inside = sorted(folder.iterdir()) if folder.is_dir() else []
    name = ".*" if of is None else re.escape(of) + r"\.\d+(\.old)?"
    pattern = re.compile(name + re.escape(PARTIAL), re.DOTALL)
    leftovers = [path for path in inside if pattern.fullmatch(path.name)]
    for leftover in leftovers:
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)
    return leftovers


def _sync_file(path: Path) -> None:
    with open(path, "rb") as written:
        os.fsync(written.fileno())


def _sync_folder(folder: Path) -> None:
    # The rename itself must reach the disk before the next step relies on it.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
