"""HTTP connections that end when a client does not send the head of a request in time.

uvicorn limits the time between requests only: a client that sends nothing, or half a head, would
hold its connection for ever.
"""

import asyncio
from functools import partial
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from reluformer.serve.limits import Limits

_ANSWER = (
    b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n"
    b"content-type: text/plain\r\n\r\n"
)


class TimedConnection(H11Protocol):
    """A connection that is closed after `seconds` without the whole head of a request."""

    def __init__(self, *arguments: Any, seconds: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        self._stop()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Wait no longer once a head has arrived."""
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        self._wait()
        super().on_response_complete()

    def _wait(self) -> None:
        self._stop()
        self._timer = self.loop.call_later(self._seconds, self._give_up)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(_ANSWER)
            self.transport.close()


def timed_connections(limits: Limits) -> Any:
    """The class of connections as uvicorn takes it."""
    return partial(TimedConnection, seconds=limits.body_seconds)
