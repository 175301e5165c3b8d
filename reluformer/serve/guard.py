"""The outermost layer: error answers, security headers, allowed hosts, counts."""

import json
import logging
import time
import traceback
from collections.abc import Callable, Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reluformer.serve.metrics import Metrics

log = logging.getLogger("reluformer")

# The page loads nothing from elsewhere, and no other page may embed it or send forms to it.
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})


class Guard:
    """Wraps the application."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        paths: Collection[str],
        hosts: Collection[str] | None,
        cancel: Callable[[], None],
    ) -> None:
        """Wrap `app`.

        Args:
            app: The application.
            metrics: Counts the answers.
            paths: Paths of the application; others are counted together.
            hosts: Names that the Host header may have besides those of the loopback interface;
                None allows any.
            cancel: Cancels all work, so that its requests are answered.
        """
        self.cancel = cancel
        self.app, self.metrics, self.paths = app, metrics, frozenset(paths)
        self.hosts = None if hosts is None else _LOOPBACK | {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.perf_counter(), 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                extra = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message["headers"] = [*message.get("headers", []), *extra]
            await send(message)

        try:
            if self._is_allowed(scope):
                await self.app(scope, receive, send_with_headers)
            else:
                await _answer(send_with_headers, 421, "the Host header is not allowed")
        except Exception as error:
            # The message of an error may quote what was sent, so that only its place is logged.
            place = traceback.extract_tb(error.__traceback__)[-1]
            log.error("%s in %s:%d", type(error).__name__, place.filename, place.lineno)
            if status == 0:
                await _answer(send_with_headers, 500, "an error of the server, please report it")
        finally:
            path = scope["path"] if scope["path"] in self.paths else "other"
            self.metrics.count_request(path, status, time.perf_counter() - start)

    def _is_allowed(self, scope: Scope) -> bool:
        """Whether the Host header is one of ours; a foreign page could rebind its own name."""
        if self.hosts is None:
            return True
        header = dict(scope["headers"]).get(b"host", b"").decode("latin-1").lower()
        name, separator, port = header.rpartition(":")
        return (name if separator and port.isdigit() else header) in self.hosts


async def _answer(send: Send, status: int, reason: str) -> None:
    body = json.dumps({"error": reason}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
