"""Atomic writes: a file or folder is complete or absent, also after a crash."""

import ctypes
import errno
import hashlib
import itertools
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from reluformer.errors import UserError
from reluformer.termination import removed_on_termination

PARTIAL = ".partial"
"""Suffix of files and folders that are being written."""

# Numbers the temporary files of this process, which may write one path from several threads.
_CALLS = itertools.count()
# Constants of Linux.
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a path to write; `path` gets the whole content when the block succeeds.

    The block writes a temporary file beside `path`, which then replaces `path` in one rename. Its
    name ends in `.partial`, so leftovers of a killed process are recognisable; a terminated one
    leaves none. A symbolic link is followed and stays a link; one with the name of the temporary
    file is not followed. A FIFO or a device cannot be replaced: the block writes into it.

    Raises:
        OSError: `path` is a folder, or writing fails. The error names `path`.
    """
    if _is_node(path):
        yield path
        return
    path = _follow_link(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial_name(path)
    with removed_on_termination(partial), _errors_name(path, partial):
        # The name may be taken by a leftover, or by a link that another user has created.
        partial.unlink(missing_ok=True)
        os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        if path.exists():
            # A private file stays private.
            partial.chmod(stat.S_IMODE(path.stat().st_mode))
        try:
            yield partial
            _sync_file(partial)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    _sync_folder(path.parent)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder to fill; it replaces `path` when the block succeeds.

    A killed process leaves only a `.partial` folder beside `path`, and a terminated one nothing. A
    symbolic link is followed and stays a link.

    Raises:
        OSError: `path` is a file, or writing fails. The error names `path`.
    """
    path = _follow_link(path)
    if path.exists() and not path.is_dir():
        raise _os_error(errno.ENOTDIR, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial_name(path)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with _errors_name(path, partial):
            with removed_on_termination(partial):
                partial.mkdir()
                if path.exists():
                    # A private folder stays private; a read-only one could not be filled.
                    partial.chmod(stat.S_IMODE(path.stat().st_mode) | stat.S_IRWXU)
                yield partial
                for folder, _, names in os.walk(partial):
                    for name in names:
                        _sync_file(Path(folder, name))
                    _sync_folder(Path(folder))
            # From here on, a folder that is moved aside may be the only copy.
            if not (path.exists() and _exchange(partial, path)):
                _replace_folder(partial, path)
        _sync_folder(path.parent)
    finally:
        # After an exchange this is the old content.
        shutil.rmtree(partial, ignore_errors=True)


def check_writable(path: Path) -> None:
    """Raise the OSError that writing the file `path` would raise, without writing anything.

    Commands call this for their outputs before they start to work.
    """
    if _is_node(path):
        return
    _check_place(_follow_link(path).parent, path)


def check_folder(path: Path) -> None:
    """Raise the OSError that creating or filling the folder `path` would raise."""
    _check_place(_follow_link(path), path)


def check_outputs(outputs: Iterable[Path | None], inputs: Iterable[Path | None] = ()) -> None:
    """Check the files that a command writes, before it starts to work.

    Args:
        outputs: Files to write; None for an option that is not used.
        inputs: Files that the command reads.

    Raises:
        OSError: A file cannot be written.
        UserError: A file would be written twice, or is an input.
    """
    used = {real_path(path) for path in inputs if path is not None}
    for path in outputs:
        if path is None:
            continue
        check_writable(path)
        # Pipes and devices can be used several times.
        if _is_node(path):
            continue
        if real_path(path) in used:
            raise UserError(f"{path} is used twice; every output needs a file of its own")
        used.add(real_path(path))


def real_path(path: Path) -> Path:
    """The absolute path with all symbolic links followed; a loop of links stays as it is."""
    # `Path.resolve` raises a RuntimeError for a loop.
    return Path(os.path.realpath(path))


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8, atomically."""
    with atomic_path(path) as partial:
        partial.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_partials(folder: Path, of: str | None = None) -> list[Path]:
    """Delete the leftovers of killed writers directly inside `folder`.

    Args:
        folder: Folder to clean; it need not exist.
        of: Name of a file or folder; only its leftovers are deleted. None deletes all.

    Returns:
        The paths that were deleted.
    """
    inside = sorted(folder.iterdir()) if folder.is_dir() else []
    name = ".*" if of is None else re.escape(of) + r"(\.\d+){1,2}(\.old)?"
    pattern = re.compile(name + re.escape(PARTIAL), re.DOTALL)
    leftovers = [path for path in inside if pattern.fullmatch(path.name)]
    for leftover in leftovers:
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)
    return leftovers


def _check_place(folder: Path, path: Path) -> None:
    """Raise the OSError, about `path`, of creating or filling `folder`."""
    while not folder.exists():
        # A link whose target does not exist, or a loop of links.
        if folder.is_symlink():
            raise _os_error(errno.ELOOP, path)
        folder = folder.parent
    if not folder.is_dir():
        raise _os_error(errno.ENOTDIR, path)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _os_error(errno.EACCES, path)


def _partial_name(path: Path) -> Path:
    """A temporary name beside `path`, for this process and this call."""
    return path.with_name(f"{path.name}.{os.getpid()}.{next(_CALLS)}{PARTIAL}")


def _replace_folder(partial: Path, path: Path) -> None:
    """Rename `partial` to `path`; a folder `path` is moved aside first, and then deleted."""
    replaced = partial.with_name(partial.name.removesuffix(PARTIAL) + f".old{PARTIAL}")
    if path.exists():
        # A rename cannot replace a folder that is not empty.
        os.replace(path, replaced)
    try:
        os.replace(partial, path)
    except OSError:
        if replaced.exists():
            os.replace(replaced, path)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two paths in one step; False where the system or the file system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    paths = os.fsencode(first), os.fsencode(second)
    done: int = rename(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE)
    return done == 0


def _is_node(path: Path) -> bool:
    """Whether `path` is a FIFO, device or socket, or a link to one; a folder is refused."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return False
    if stat.S_ISDIR(mode):
        raise _os_error(errno.EISDIR, path)
    return not stat.S_ISREG(mode)


def _follow_link(path: Path) -> Path:
    """Target of a symbolic link, which need not exist; any other path unchanged."""
    return real_path(path) if path.is_symlink() else path


@contextmanager
def _errors_name(path: Path, partial: Path) -> Iterator[None]:
    """Put `path` in errors that name its temporary file, or no file, as for a full disk."""
    try:
        yield
    except OSError as error:
        unnamed = error.filename is None and error.errno is not None
        if unnamed or str(error.filename).startswith(str(partial)):
            error.filename = str(path)
        raise


def _os_error(code: int, path: Path) -> OSError:
    return OSError(code, os.strerror(code), str(path))


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
