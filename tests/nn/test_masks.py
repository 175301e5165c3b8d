"""Masks of torch: their contents choose causality and lengths, and are read again when changed."""

import pytest
import torch

from reluformer.errors import UserError
from reluformer.nn import masks
from reluformer.nn.masks import MaskSizes, TorchMask, from_sdpa, from_torch

SIZES = MaskSizes(2, 3, 4, 4)
CAUSAL = torch.ones(4, 4, dtype=torch.bool).triu(1)


def as_float(mask: torch.Tensor) -> torch.Tensor:
    return torch.zeros(mask.shape).masked_fill(mask, -torch.inf)


@pytest.mark.parametrize("mask", [CAUSAL, as_float(CAUSAL)], ids=["bool", "float"])
def test_causal_masks_are_recognised(mask: torch.Tensor) -> None:
    result = from_torch(mask, None, False, SIZES)
    assert result == (None, True, None, None)
    other = mask.clone()
    other[3, 0] = other[0, 3]
    assert from_torch(other, None, False, SIZES).mask is not None
    assert from_torch(mask.expand(6, 4, 4), None, False, SIZES).causal is False


@pytest.mark.parametrize("is_float", [False, True])
def test_right_padding_becomes_lengths(is_float: bool) -> None:
    padding = torch.arange(4) >= torch.tensor([[4], [0]])
    mask = as_float(padding) if is_float else padding
    result = from_torch(None, mask, False, SIZES)
    assert result.mask is None and result.bias is None
    assert result.key_lengths.tolist() == [4, 0]
    hole = padding.clone()
    hole[0, 1] = True
    result = from_torch(None, as_float(hole) if is_float else hole, False, SIZES)
    assert result.key_lengths is None and torch.equal(result.mask[:, 0, 0], ~hole)


def test_a_bias_keeps_its_values_and_hides_infinities() -> None:
    table = torch.randn(4, 4).masked_fill(CAUSAL, -torch.inf)
    result = from_torch(table, None, False, SIZES)
    assert result.causal and result.mask is None
    assert torch.equal(result.bias[0, 0], table.masked_fill(CAUSAL, 0.0))
    padding = torch.zeros(2, 4)
    padding[:, 1] = 0.5
    both = from_torch(table, padding, False, SIZES)
    torch.testing.assert_close(both.bias[1, 0], table.masked_fill(CAUSAL, 0.0) + padding[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_smallest_number_hides_a_key_as_minus_infinity_does(dtype: torch.dtype) -> None:
    sizes = MaskSizes(1, 1, 4, 4)
    future = torch.ones(4, 4, dtype=torch.bool).triu(1)
    mask = torch.zeros(4, 4, dtype=dtype).masked_fill(future, torch.finfo(dtype).min)
    assert from_torch(mask, None, False, sizes) == TorchMask(None, True, None, None)
    large = torch.zeros(4, 4, dtype=dtype).masked_fill(future, -1e9)
    found = from_torch(large, None, False, sizes)
    assert found.bias is not None and not found.causal, "any other number is a bias"


def test_masks_of_sdpa() -> None:
    visible = ~CAUSAL
    assert from_sdpa(None, True, SIZES) == (None, True, None, None)
    assert from_sdpa(visible, False, SIZES).mask is visible
    assert from_sdpa(as_float(CAUSAL), False, SIZES) == (None, True, None, None)
    with pytest.raises(UserError, match="is_causal=True needs as many queries as keys, got 3 and"):
        from_sdpa(None, True, MaskSizes(1, 1, 3, 4))
    with pytest.raises(UserError, match="attn_mask must be bool .* got torch.int64"):
        from_sdpa(CAUSAL.long(), False, SIZES)


def test_masks_that_are_traced_or_learned_are_not_read() -> None:
    learned = as_float(CAUSAL).masked_fill(CAUSAL, 0.0).requires_grad_()
    assert from_torch(learned, None, False, SIZES).bias is not None
    results = []
    torch.vmap(lambda mask: results.append(from_torch(mask, None, False, SIZES)) or mask)(
        CAUSAL[None]
    )
    assert not results[0].causal and results[0].mask is not None


def test_contents_are_remembered_until_the_mask_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    read = masks._read
    monkeypatch.setattr(masks, "_read", lambda table: reads.append(1) or read(table))
    mask = CAUSAL.clone()
    assert all(masks._remembered(mask, mask[None, None]).is_causal for _ in range(3))
    assert len(reads) == 1
    mask[0, 1] = False
    assert not masks._remembered(mask, mask[None, None]).is_causal
    assert len(reads) == 2
    with torch.inference_mode():
        untracked = CAUSAL.clone()
        masks._remembered(untracked, untracked[None, None])
        masks._remembered(untracked, untracked[None, None])
    assert len(reads) == 4
