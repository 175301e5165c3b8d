"""Removal of temporary files when the process is terminated (SIGTERM)."""

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

# Paths that are being written, and the process that writes them: a forked one inherits the table.
_WRITTEN: dict[Path, int] = {}


@contextmanager
def removed_on_termination(path: Path) -> Iterator[None]:
    """Remove `path`, a file or folder, if the process is terminated during the block.

    The process then ends as it does without this function. Handlers of a program stay. Only the
    main thread can handle signals: writers in other threads are served while it writes, too.
    """
    is_main = threading.current_thread() is threading.main_thread()
    # Without a handler, the first process of a container ignores the signal and goes on.
    is_first = os.getpid() == 1
    handles = is_main and not is_first and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    _WRITTEN[path] = os.getpid()
    if handles:
        signal.signal(signal.SIGTERM, _remove_and_end)
    try:
        yield
    finally:
        if handles and signal.getsignal(signal.SIGTERM) is _remove_and_end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _WRITTEN.pop(path, None)


def _remove_and_end(number: int, frame: FrameType | None) -> None:
    """Signal handler: remove what this process is writing, and end it by the same signal."""
    for path, process in list(_WRITTEN.items()):
        if process != os.getpid():
            continue
        shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):
            path.unlink(missing_ok=True)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
