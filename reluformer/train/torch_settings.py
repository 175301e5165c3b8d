"""Settings of the process during a training: threads, determinism, matrix products, memory."""

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from reluformer.config.train import TrainConfig
from reluformer.products import fast_products

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
        with fast_products(device.type), _kept_memory() if device.type == "cpu" else nullcontext():
            yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(strict, warn_only=lenient)


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
