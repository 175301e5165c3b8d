"""Running the server until it is stopped."""

import logging
import socket
import sys
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from reluformer.errors import UserError
from reluformer.serve.connection import timed_connections
from reluformer.serve.limits import Limits

LOOPBACK = ("127.0.0.1", "localhost", "::1")

# Seconds that requests have for their end when the server is stopped.
_GRACE = 10


def serve(
    app: ASGIApp, host: str, port: int, limits: Limits, started: Callable[[str], Any]
) -> None:
    """Serve until the process is interrupted or terminated; requests may finish first.

    Args:
        app: The application.
        host: Address of the interface to listen on.
        port: Port; 0 takes a free one.
        limits: Limits of connections.
        started: Called with the address of the page.

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
            timeout_graceful_shutdown=_GRACE,
            timeout_keep_alive=5,
            h11_max_incomplete_event_size=2**15,
            http=timed_connections(limits),
            ws="none",
            server_header=False,
        )
        uvicorn.Server(config).run(sockets=[listener])
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
