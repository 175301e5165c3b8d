"""The native library, built once for all workers where the user's cache does not have it."""

from functools import cache

import pytest

from reluformer.ops.backends.cpu.native import library
from tests.native_library import load_or_build


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> library.Kernels:
    """The native library, from the user's cache if it is there."""
    return load_or_build(tmp_path_factory)


@pytest.fixture(autouse=True)
def native(kernels: library.Kernels, monkeypatch: pytest.MonkeyPatch) -> library.Kernels:
    """The library is built, as far as the package can see."""
    # `build` clears the cache of `load`.
    monkeypatch.setattr(library, "load", cache(lambda: kernels))
    return kernels
