"""Servers in processes of their own."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Server:
    """A running server.

    Attributes:
        url: Address of its page.
        process: Its process.
    """

    def __init__(self, *arguments: object) -> None:
        """Start `python ARGUMENTS` and wait for the line with the address."""
        self.process = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.url = next(word for word in line.split() if word.startswith("http://"))

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self.url.rpartition(":")[2])

    def stop(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


@contextmanager
def upper_case_server(
    folder: Path, *, port: int = 0, delay: float = 0.0, grace: float = 10
) -> Iterator[Server]:
    """A server that translates into upper case, `delay` seconds for each sentence."""
    server = Server("-m", "tests.serve.upper_case_server", folder, port, delay, grace)
    try:
        yield server
    finally:
        server.stop()
