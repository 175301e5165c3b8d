"""Fixtures of the tests of operations: native CPU kernels, and an empty memory of choices."""

import pytest

from reluformer.ops import signature
from reluformer.ops.backends.cpu.native import library
from tests.native_library import load_or_build


@pytest.fixture(autouse=True)
def no_choices() -> None:
    """Tests that replace backends must not see choices of other tests."""
    signature.CHOICES.clear()


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> library.Kernels:
    """The native kernels, from the user's cache if they are there."""
    return load_or_build(tmp_path_factory)


@pytest.fixture
def compiled(kernels: library.Kernels, monkeypatch: pytest.MonkeyPatch) -> library.Kernels:
    """impl="cpu" takes the native kernels wherever they run the call."""
    monkeypatch.setattr(library, "load", lambda: kernels)
    return kernels
