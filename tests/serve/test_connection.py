"""Connections whose client does not send the head of a request are closed."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import uvicorn

from reluformer.serve.connection import TimedConnection

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def slow(scope: Any, receive: Any, send: Any) -> None:
    """An application that takes longer than clients have for a head."""
    await asyncio.sleep(0.5)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"done"})


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    connections: Any = partial(TimedConnection, seconds=0.2)
    config = uvicorn.Config(slow, http=connections, ws="none", lifespan="off", log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield listener.getsockname()
    server.should_exit = True
    thread.join()
    listener.close()


def answer(address: tuple[str, int], *messages: bytes) -> bytes:
    """All that the server sends until it closes the connection."""
    received = b""
    with socket.create_connection(address, timeout=5) as connection:
        for message in messages:
            connection.sendall(message)
        while data := connection.recv(4096):
            received += data
    return received


@pytest.mark.parametrize("head", [b"", b"GET / HT", GET[:-2]])
def test_a_missing_head_ends_the_connection(address: tuple[str, int], head: bytes) -> None:
    assert answer(address, head).startswith(b"HTTP/1.1 408 ")


def test_a_slow_answer_is_waited_for_and_the_next_head_is_timed(address: tuple[str, int]) -> None:
    first, second = answer(address, GET, GET[:9]).split(b"HTTP/1.1 408")
    assert first.startswith(b"HTTP/1.1 200 ") and b"done" in first and second
