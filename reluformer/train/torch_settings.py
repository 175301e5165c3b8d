"""Settings of the process during a training: threads, determinism, matrix products, memory."""

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from reluformer.config.train import TrainConfig

# Parameters of glibc's `mallopt`, and the numbers that its own adaptation reaches with tensors of
# tens of megabytes. It adapts no further once a parameter has been set.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_USUAL = {_MMAP_MAX: 65536, _MMAP_THRESHOLD: 32 << 20, _TRIM_THRESHOLD: 64 << 20}
_KEEP = {_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1}


@contextmanager
def torch_settings(config: TrainConfig, device: torch.device) -> Iterator[None]:
    """Global settings of a run, restored on exit; environment variables stay set."""
    threads = torch.get_num_threads()
    strict = torch.are_deterministic_algorithms_enabled()
    lenient = torch.is_deterministic_algorithms_warn_only_enabled()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if device.type == "cuda":
        # Compiled layer norms sum the gradients of their weights in a pass of their own, which was
        # measured to be faster. The variable is read when something is first compiled.
        os.environ.setdefault("TORCHINDUCTOR_MIX_ORDER_REDUCTION", "0")
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        with _fast_products(device), _kept_memory() if device.type == "cpu" else nullcontext():
            yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(strict, warn_only=lenient)


@contextmanager
def _fast_products(device: torch.device) -> Iterator[None]:
    """Compute float32 products in TF32 on a GPU, and by oneDNN on a CPU."""
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:
        # The caller has set precisions of single backends (`torch.backends`), which are kept.
        yield
        return
    try:
        if device.type == "cuda":
            torch.set_float32_matmul_precision("high")
        else:
            _prefer_onednn(before)
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _prefer_onednn(before: str) -> None:
    """Let oneDNN compute float32 products, if it does so in float32.

    By default torch uses MKL, which leaves AVX-512 unused on AMD processors. "medium" selects
    oneDNN and allows it to round to bfloat16, which it does where that is faster: with AMX.
    """
    torch.set_float32_matmul_precision("medium")
    # bfloat16 has 8 bits: it would round these numbers to 1.
    numbers = torch.full((128, 128), 1 + 2**-12, dtype=torch.float32)
    if not torch.equal(numbers @ torch.ones_like(numbers), 128 * numbers):
        torch.set_float32_matmul_precision(before)


@contextmanager
def _kept_memory() -> Iterator[None]:
    """Keep freed memory in the process.

    By default glibc returns large tensors to the system and takes their pages back in the next
    step, filled with zeros one by one, which takes a quarter of a step. Other allocators are left
    as they are.
    """
    if platform.libc_ver()[0] != "glibc":
        yield
        return
    library = ctypes.CDLL(None)
    for parameter, value in _KEEP.items():
        library.mallopt(parameter, value)
    try:
        yield
    finally:
        for parameter, value in _USUAL.items():
            library.mallopt(parameter, value)
        library.malloc_trim(0)
