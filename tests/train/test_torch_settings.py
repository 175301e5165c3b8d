"""Settings of a training change the speed of a CPU and no results, and are restored."""

import os
import platform
import resource

import pytest
import torch

from reluformer.config.train import TrainConfig
from reluformer.train.torch_settings import torch_settings

CPU = torch.device("cpu")


def test_float32_products_stay_float32() -> None:
    """Whatever a library does with "medium" on this processor."""
    torch.manual_seed(0)
    a, b = torch.randn(256, 512), torch.randn(512, 384)
    with torch_settings(TrainConfig(), CPU):
        torch.testing.assert_close((a @ b).double(), a.double() @ b.double(), atol=1e-3, rtol=0)
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_processor_that_rounds_to_bfloat16_keeps_the_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    product, rounded = torch.Tensor.__matmul__, torch.Tensor.bfloat16
    monkeypatch.setattr(
        torch.Tensor, "__matmul__", lambda a, b: product(rounded(a), rounded(b)).float()
    )
    with torch_settings(TrainConfig(), CPU):
        assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have no mallopt")
def test_freed_memory_is_used_again() -> None:
    def page_faults() -> int:
        begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(10):
            torch.ones(2**24)  # 64 MiB: 16,384 pages
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begin

    with torch_settings(TrainConfig(), CPU):
        page_faults()
        assert page_faults() < 16384
    assert page_faults() > 16384


def test_precisions_of_single_backends_are_kept() -> None:
    """torch refuses to tell its one setting for all backends after one of them was set."""
    products = torch.backends.mkldnn.matmul
    before = products.fp32_precision
    products.fp32_precision = "bf16"
    try:
        with torch_settings(TrainConfig(), CPU):
            assert products.fp32_precision == "bf16"
        assert products.fp32_precision == "bf16"
    finally:
        products.fp32_precision = before


def test_a_gpu_gets_the_faster_gradients_of_layer_norms_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "TORCHINDUCTOR_MIX_ORDER_REDUCTION"
    monkeypatch.setenv(name, "1")
    with torch_settings(TrainConfig(), torch.device("cuda")):
        assert os.environ[name] == "1"
    monkeypatch.delenv(name)
    with torch_settings(TrainConfig(), torch.device("cpu")):
        assert name not in os.environ
    with torch_settings(TrainConfig(), torch.device("cuda")):
        assert os.environ[name] == "0"
