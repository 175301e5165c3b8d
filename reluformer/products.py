"""Fast float32 matrix products: TF32 on a GPU, the faster of torch's two libraries on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


@contextmanager
def fast_products(device: str) -> Iterator[None]:
    """Set how torch computes float32 products on a kind of device; restored on exit.

    On "cuda" they are TF32. On "cpu" they keep float32 precision.
    """
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:
        # The caller has set precisions of single backends (`torch.backends`), which are kept.
        yield
        return
    if device == "cuda":
        torch.set_float32_matmul_precision("high")
    elif onednn_is_exact():
        torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@cache
def onednn_is_exact() -> bool:
    """Whether oneDNN, which "medium" selects, computes float32 products in float32.

    By default torch uses MKL, which leaves AVX-512 unused on AMD processors. "medium" also allows
    oneDNN to round to bfloat16, which it does where that is faster: with AMX.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        # bfloat16 has 8 bits: it would round these numbers to 1.
        numbers = torch.full((128, 128), 1 + 2**-12, dtype=torch.float32)
        return torch.equal(numbers @ torch.ones_like(numbers), 128 * numbers)
    finally:
        torch.set_float32_matmul_precision(before)
