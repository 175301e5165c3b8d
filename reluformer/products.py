"""Fast float32 matrix products: TF32 on a GPU, the faster of torch's two libraries on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

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
    try:
        if device == "cuda":
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
