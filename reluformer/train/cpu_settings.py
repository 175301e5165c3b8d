"""Settings of the process that make training on a CPU faster: matrix products and memory."""

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Parameters of glibc's `mallopt`, and the numbers that its own adaptation reaches with tensors of
# tens of megabytes. It adapts no further once a parameter has been set.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_USUAL = {_MMAP_MAX: 65536, _MMAP_THRESHOLD: 32 << 20, _TRIM_THRESHOLD: 64 << 20}
_KEEP = {_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1}


@contextmanager
def cpu_settings() -> Iterator[None]:
    """Compute float32 products by oneDNN and keep freed memory; restored on exit."""
    precision = torch.get_float32_matmul_precision()
    _prefer_onednn()
    allocator = _glibc()
    _set(allocator, _KEEP)
    try:
        yield
    finally:
        _set(allocator, _USUAL)
        if allocator is not None:
            allocator.malloc_trim(0)
        torch.set_float32_matmul_precision(precision)


def _prefer_onednn() -> None:
    """Let oneDNN compute float32 products, if it does so in float32.

    By default torch uses MKL, which leaves AVX-512 unused on AMD processors. "medium" selects
    oneDNN and allows it to round to bfloat16, which it does where that is faster: with AMX.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    # bfloat16 has 8 bits: it would round these numbers to 1.
    numbers = torch.full((128, 128), 1 + 2**-12, dtype=torch.float32)
    if not torch.equal(numbers @ torch.ones_like(numbers), 128 * numbers):
        torch.set_float32_matmul_precision(before)


def _glibc() -> ctypes.CDLL | None:
    """The C library if its allocator has the parameters above."""
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None


def _set(allocator: ctypes.CDLL | None, parameters: dict[int, int]) -> None:
    """Set parameters of the allocator.

    By default glibc returns large tensors to the system and takes their pages back in the next
    step, filled with zeros one by one, which takes a quarter of a step.
    """
    if allocator is not None:
        for name, value in parameters.items():
            allocator.mallopt(name, value)
