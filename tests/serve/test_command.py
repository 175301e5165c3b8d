"""`reluformer serve` as a process: clients, disconnections, shutdown."""

import json
import signal
import socket
import time
import urllib.request
from pathlib import Path

import pytest
from libretranslatepy import LibreTranslateAPI
from typer.testing import CliRunner

from reluformer import Translator
from reluformer.cli import app
from tests.serve.processes import Server, upper_case_server

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("serve")]


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def send(server: Server, path: str, fields: dict) -> socket.socket:
    """Send a request and return the open connection."""
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def wait_until_metrics_have(server: Server, text: str) -> None:
    end = time.monotonic() + 5
    while text not in get(f"{server.url}/metrics"):
        assert time.monotonic() < end, get(f"{server.url}/metrics")
        time.sleep(0.02)


def test_a_client_of_libretranslate_works_and_an_interrupt_stops(folder: Path) -> None:
    server = Server("-m", "reluformer", "serve", "--model", folder, "--port", 0)
    try:
        client = LibreTranslateAPI(server.url)
        assert client.languages()[0]["code"] == "en"
        assert client.detect("Good morning")[0]["language"] == "en"
        text = "It costs three euros."
        (expected,) = Translator.load(folder).document([text])
        assert client.translate(text, "en", "de") == expected.strip()
        assert "Translate" in get(server.url)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(10) == 0
    finally:
        server.stop()


@pytest.mark.parametrize("path", ["/translate", "/stream"])
def test_a_closed_connection_stops_the_work(server: Server, path: str) -> None:
    cancelled = get(f"{server.url}/metrics").split("reluformer_cancelled_total ")[-1]
    before = int(cancelled.split()[0])
    connection = send(server, path, {"q": "One here. " * 100})
    wait_until_metrics_have(server, 'reluformer_jobs{state="running"} 1')
    connection.close()
    start = time.monotonic()
    wait_until_metrics_have(server, f"reluformer_cancelled_total {before + 1}")
    wait_until_metrics_have(server, 'reluformer_jobs{state="running"} 0')
    assert time.monotonic() - start < 3


def test_a_large_body_gets_its_answer(server: Server) -> None:
    connection = send(server, "/translate", {"q": "x" * 10_000_000})
    answer = b""
    while chunk := connection.recv(65536):
        answer += chunk
    assert answer.startswith(b"HTTP/1.1 413 ") and b'{"error":' in answer


def test_random_bytes_do_not_disturb(server: Server) -> None:
    for junk in (
        b"\0" * 100,
        b"GET / HTTP/9.9\r\n\r\n",
        b"A" * 100_000,
        b"POST /translate HTTP/1.1\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(junk)
    assert json.loads(get(f"{server.url}/health")) == {"status": "ok"}


def test_a_termination_lets_requests_finish(folder: Path) -> None:
    with upper_case_server(folder, delay=0.3) as server:
        connection = send(server, "/translate", {"q": "One here. Two here."})
        wait_until_metrics_have(server, 'reluformer_jobs{state="running"} 1')
        server.process.send_signal(signal.SIGTERM)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
        assert b"ONE HERE. TWO HERE." in answer
        server.process.wait(10)


@pytest.mark.parametrize("path", ["/translate", "/stream"])
def test_a_request_without_end_is_told_that_the_server_stops(folder: Path, path: str) -> None:
    with upper_case_server(folder, delay=0.05, grace=0.5) as server:
        connection = send(server, path, {"q": "One here. " * 150})
        wait_until_metrics_have(server, 'reluformer_jobs{state="running"} 1')
        server.process.send_signal(signal.SIGTERM)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
        assert b'"error": "the server is stopping"' in answer.replace(b'":"', b'": "')
        assert server.process.wait(10) == -signal.SIGTERM
        assert server.process.stderr is not None
        assert "Traceback" not in server.process.stderr.read()


def test_a_port_in_use_is_one_sentence(server: Server, folder: Path) -> None:
    options = ["serve", "--model", str(folder), "--port", str(server.port)]
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 2 and "cannot be used" in done.output
