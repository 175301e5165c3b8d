"""A server for tests in a process of its own, which translates into upper case.

python -m tests.serve.upper_case_server FOLDER PORT DELAY GRACE
"""

import sys
from pathlib import Path

from reluformer.serve.app import build_app
from reluformer.serve.limits import Limits
from reluformer.serve.metrics import Metrics
from reluformer.serve.run import serve
from reluformer.serve.service import Demo, Service
from tests.serve.tiny import EchoTranslator


def main(folder: str, port: str, delay: str, grace: str) -> None:
    """Serve until the process is terminated."""
    translator = EchoTranslator.load(Path(folder))
    translator.delay = float(delay)
    limits = Limits(characters=2000)
    service = Service(translator, "tiny", Metrics(), demo=Demo.load(Path(folder)))
    app = build_app(service, limits, [])
    address = ("127.0.0.1", int(port))
    serve(app, *address, limits, lambda url: print(url, flush=True), float(grace))


if __name__ == "__main__":
    main(*sys.argv[1:])
