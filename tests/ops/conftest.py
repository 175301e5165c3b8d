"""The compiled CPU kernels, built once for a session where a compiler is."""

import pytest

from reluformer.errors import UserError
from reluformer.ops.backends.cpu.native import library


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> library.Kernels:
    """The kernels, those of the user's cache if they are there."""
    found = library.load()
    if found is None:
        try:
            # Beside the folders of all workers, who may all build at once.
            found = library.Kernels(library.build(tmp_path_factory.getbasetemp().parent))
        except UserError as problem:
            pytest.skip(f"no compiled kernels: {problem}")
    return found


@pytest.fixture
def compiled(kernels: library.Kernels, monkeypatch: pytest.MonkeyPatch) -> library.Kernels:
    """Makes impl="cpu" take the compiled kernels wherever they run the call."""
    monkeypatch.setattr(library, "load", lambda: kernels)
    return kernels
