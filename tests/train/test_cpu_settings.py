"""Settings for training on a CPU change its speed, and no results."""

import platform
import resource

import pytest
import torch

from reluformer.train.cpu_settings import cpu_settings


def test_float32_products_stay_float32() -> None:
    """Whatever a library does with "medium" on this processor."""
    torch.manual_seed(0)
    a, b = torch.randn(256, 512), torch.randn(512, 384)
    with cpu_settings():
        torch.testing.assert_close((a @ b).double(), a.double() @ b.double(), atol=1e-3, rtol=0)
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_processor_that_rounds_to_bfloat16_keeps_the_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    product, rounded = torch.Tensor.__matmul__, torch.Tensor.bfloat16
    monkeypatch.setattr(
        torch.Tensor, "__matmul__", lambda a, b: product(rounded(a), rounded(b)).float()
    )
    with cpu_settings():
        assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have no mallopt")
def test_freed_memory_is_used_again() -> None:
    def page_faults() -> int:
        begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(10):
            torch.ones(2**24)  # 64 MiB: 16,384 pages
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begin

    with cpu_settings():
        page_faults()
        assert page_faults() < 16384
    assert page_faults() > 16384
