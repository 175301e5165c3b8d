"""Atomic writes: a file is either whole or not there."""

import json
import os
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
    try:
        yield partial
        with open(partial, "rb") as written:
            os.fsync(written.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    _sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8, atomically."""
    with atomic_path(path) as partial:
        partial.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def remove_partials(folder: Path) -> list[Path]:
    """Delete the leftovers of killed writers directly inside `folder`; return what was deleted."""
    leftovers = sorted(folder.glob(f"*{PARTIAL}"))
    for leftover in leftovers:
        leftover.unlink(missing_ok=True)
    return leftovers


def _sync_folder(folder: Path) -> None:
    # The rename itself must reach the disk before the next step relies on it.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
