"""What every test runs under: one seed, one thread, and memory that is never clean by luck."""

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# Without a GPU the kernels run on Triton's interpreter, chosen before Triton is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# The suite runs in parallel: more threads per process would only contend. Examples are the same on
# every run, so that a red test stays red until it is mended.
torch.set_num_threads(1)
settings.register_profile("suite", deadline=None, max_examples=20, derandomize=True)
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seeds torch before each test; a test that needs the number asks for it."""
    torch.manual_seed(0)
    return 0


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fills what `torch.empty` and its kin return with NaN (the largest value for integers).

    Fresh memory is often zero, so a kernel that forgets to write its output passes by luck. This is
    torch's own switch, beneath Python: it also holds in C++, in compiled code and for `new_empty`.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
