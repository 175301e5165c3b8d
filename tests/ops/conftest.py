"""Fixtures of the tests of operations: native CPU kernels, and an empty memory of choices."""

import pytest

from reluformer.errors import UserError
from reluformer.ops import signature
from reluformer.ops.backends.cpu.native import library


@pytest.fixture(autouse=True)
def no_choices() -> None:
    """Tests that replace backends must not see choices of other tests."""
    signature.CHOICES.clear()


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> library.Kernels:
    """The native kernels, from the user's cache if they are there."""
    loaded = library.load()
    if loaded is None:
        try:
            # The folder is shared by all workers, which may all build at once.
            loaded = library.Kernels(library.build(tmp_path_factory.getbasetemp().parent))
        except UserError as problem:
            pytest.skip(f"no native kernels: {problem}")
    return loaded


@pytest.fixture
def compiled(kernels: library.Kernels, monkeypatch: pytest.MonkeyPatch) -> library.Kernels:
    """impl="cpu" takes the native kernels wherever they run the call."""
    monkeypatch.setattr(library, "load", lambda: kernels)
    return kernels
