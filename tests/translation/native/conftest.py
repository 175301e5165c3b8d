"""The native library, built once for all workers where the user's cache does not have it."""

from functools import cache

import pytest

from reluformer.errors import UserError
from reluformer.ops.backends.cpu.native import library


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> library.Kernels:
    """The native library, from the user's cache if it is there."""
    loaded = library.load()
    if loaded is None:
        try:
            loaded = library.Kernels(library.build(tmp_path_factory.getbasetemp().parent))
        except UserError as problem:
            pytest.skip(f"no native library: {problem}")
    return loaded


@pytest.fixture(autouse=True)
def native(kernels: library.Kernels, monkeypatch: pytest.MonkeyPatch) -> library.Kernels:
    """The library is built, as far as the package can see."""
    # `build` clears the cache of `load`.
    monkeypatch.setattr(library, "load", cache(lambda: kernels))
    return kernels
