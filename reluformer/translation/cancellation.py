"""Cancellation of translations from another thread."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_event: ContextVar[threading.Event | None] = ContextVar("cancellation", default=None)


class Cancelled(Exception):
    """The translation was cancelled."""


@contextmanager
def cancellable(event: threading.Event) -> Iterator[None]:
    """Translations inside the block raise `Cancelled` soon after `event` is set."""
    token = _event.set(event)
    try:
        yield
    finally:
        _event.reset(token)


def check_cancelled() -> None:
    """Raise `Cancelled` if the translation that runs here was cancelled.

    Searches call it once for every decoding step.
    """
    event = _event.get()
    if event is not None and event.is_set():
        raise Cancelled
