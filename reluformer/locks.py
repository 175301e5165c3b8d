"""Locks of folders that are being written; the system releases them when a process ends."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from reluformer.errors import UserError


@contextmanager
def lock_file(path: Path, message: str, *, remove: bool = False) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`, which is created if needed, for the block.

    The file's content is not touched, and a symbolic link is refused. Without effect on systems
    without file locks.

    Args:
        path: File to lock, in an existing folder.
        message: Message of the UserError if another process holds the lock.
        remove: Delete the file at the end of the block.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    descriptor = _open(path)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(message) from None
        # The previous holder may have deleted the file between our opening and locking it.
        if not path.exists() or not os.path.samestat(os.fstat(descriptor), path.stat()):
            raise UserError(message)
        try:
            yield
        finally:
            if remove:
                path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        reason = "it is a symbolic link" if path.is_symlink() else error.strerror
        raise UserError(f"{path} cannot be locked: {reason}") from None
