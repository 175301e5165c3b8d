"""Fast float32 products of a CPU keep float32 precision, and settings are restored."""

import pytest
import torch

from reluformer.products import fast_products, onednn_is_exact


def test_float32_products_stay_float32() -> None:
    """Whatever a library does with "medium" on this processor."""
    torch.manual_seed(0)
    a, b = torch.randn(256, 512), torch.randn(512, 384)
    with fast_products("cpu"):
        torch.testing.assert_close((a @ b).double(), a.double() @ b.double(), atol=1e-3, rtol=0)
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_processor_that_rounds_to_bfloat16_keeps_the_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    product, rounded = torch.Tensor.__matmul__, torch.Tensor.bfloat16
    monkeypatch.setattr(
        torch.Tensor, "__matmul__", lambda a, b: product(rounded(a), rounded(b)).float()
    )
    onednn_is_exact.cache_clear()
    try:
        with fast_products("cpu"):
            assert torch.get_float32_matmul_precision() == "highest"
    finally:
        onednn_is_exact.cache_clear()


def test_precisions_of_single_backends_are_kept() -> None:
    """torch refuses to tell its one setting for all backends after one of them was set."""
    products = torch.backends.mkldnn.matmul
    before = products.fp32_precision
    products.fp32_precision = "bf16"
    try:
        with fast_products("cpu"):
            assert products.fp32_precision == "bf16"
        assert products.fp32_precision == "bf16"
    finally:
        products.fp32_precision = before
