"""The native CPU library for tests, built at most once for all workers."""

import pytest

from reluformer.errors import UserError
from reluformer.ops.backends.cpu.native import library


def load_or_build(tmp_path_factory: pytest.TempPathFactory) -> library.Kernels:
    """The library from the user's cache, or built for this run; skips without a compiler."""
    loaded = library.load()
    if loaded is not None:
        return loaded
    try:
        # The folder is shared by all workers, which may all build at once.
        return library.Kernels(library.build(tmp_path_factory.getbasetemp().parent))
    except UserError as problem:
        pytest.skip(f"no native library: {problem}")
