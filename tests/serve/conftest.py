"""Applications and servers with translators whose results are known."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from starlette.types import ASGIApp

from reluformer.serve.app import build_app
from reluformer.serve.limits import Limits
from reluformer.serve.metrics import Metrics
from reluformer.serve.service import Demo, Service
from tests.serve.processes import Server, upper_case_server
from tests.serve.tiny import EchoTranslator, tiny_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def server(folder: Path) -> Iterator[Server]:
    """A server in a process of its own, which takes a tenth of a second for a sentence."""
    with upper_case_server(folder, delay=0.1) as server:
        yield server


@pytest.fixture(scope="session")
def make_app(folder: Path) -> Callable[..., ASGIApp]:
    """Builds applications that translate into upper case."""

    def make(
        *, delay: float = 0.0, demo: Demo | None = None, hosts: list[str] | None = None, **limits
    ) -> ASGIApp:
        translator = EchoTranslator.load(folder)
        translator.delay = delay
        service = Service(translator, "tiny", Metrics(), demo=demo)
        return build_app(service, Limits(**{"characters": 500, **limits}), hosts)

    return make
