"""Running the server until it is stopped."""

import asyncio
import logging
import math
import socket
import sys
from collections.abc import Callable
from typing import Any

import uvicorn

from reluformer.errors import UserError
from reluformer.serve.connection import timed_connections
from reluformer.serve.guard import Guard
from reluformer.serve.limits import Limits

LOOPBACK = ("127.0.0.1", "localhost", "::1")

# Seconds for the answers of requests that were cancelled.
_LAST_SECONDS = 2


class _Server(uvicorn.Server):
    """A server that cancels work which takes too long when it is stopped.

    uvicorn itself would cut its connections, and print a traceback for each.
    """

    def __init__(self, config: uvicorn.Config, cancel: Callable[[], None], grace: float) -> None:
        super().__init__(config)
        self._cancel, self._grace = cancel, grace

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for requests, then cancel the others."""
        timer = asyncio.get_running_loop().call_later(self._grace, self._cancel)
        await super().shutdown(sockets)
        timer.cancel()


def serve(
    app: Guard,
    host: str,
    port: int,
    limits: Limits,
    started: Callable[[str], Any],
    grace: float = 10,
) -> None:
    """Serve until the process is interrupted or terminated; requests may finish first.

    Args:
        app: The application.
        host: Address of the interface to listen on.
        port: Port; 0 takes a free one.
        limits: Limits of connections.
        started: Called with the address of the page.
        grace: Seconds that requests have for their end when the server is stopped.

    Raises:
        UserError: The address cannot be used.
    """
    # Warnings of single translations are of no use in a log, and nothing that is sent is logged.
    logging.getLogger("reluformer").setLevel(logging.ERROR)
    listener = _listen(host, port)
    address, port = listener.getsockname()[:2]
    try:
        # From here on, an interruption is the way to stop the server.
        started(f"http://{f'[{address}]' if ':' in address else address}:{port}")
        config = uvicorn.Config(
            app,
            access_log=False,
            log_level="error",
            limit_concurrency=limits.connections,
            timeout_graceful_shutdown=math.ceil(grace + _LAST_SECONDS),
            timeout_keep_alive=5,
            h11_max_incomplete_event_size=2**15,
            http=timed_connections(limits),
            ws="none",
            server_header=False,
        )
        _Server(config, app.cancel, grace).run(sockets=[listener])
    except KeyboardInterrupt:
        print("reluformer: stopped", file=sys.stderr)
    finally:
        listener.close()


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket, opened here so that a failure is one sentence."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        # Clients may connect from now on, before the server answers.
        listener.listen(128)
        return listener
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"host {host} and port {port} cannot be used: {reason}") from None
