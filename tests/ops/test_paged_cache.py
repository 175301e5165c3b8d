"""The paged cache and the reference of `decode_attention`, on any machine."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from reluformer import PagedCache, decode_attention, relu_attention
from reluformer.errors import UserError

NAN = float("nan")


def tokens(counts: list[int], kv_heads: int = 2, width: int = 8) -> tuple[Tensor, Tensor]:
    """Keys and values of a ragged batch, NaN past each count."""
    shape = (len(counts), kv_heads, max(counts), width)
    keys, values = torch.randn(shape), torch.randn(shape)
    for row, count in enumerate(counts):
        keys[row, :, count:] = values[row, :, count:] = NAN
    return keys, values


def one_by_one(q: Tensor, parts: list[list[tuple[Tensor, Tensor]]], **options: Any) -> Tensor:
    """`relu_attention` of each sequence alone, on the tokens it was given."""
    rows = []
    for row, sequence in enumerate(parts):
        keys, values = (torch.cat(each, dim=1)[None] for each in zip(*sequence, strict=True))
        rows.append(relu_attention(q[row : row + 1], keys, values, impl="reference", **options))
    return torch.cat(rows)


@pytest.mark.parametrize(("causal", "row_normalise"), [(True, 0.01), (False, None)])
def test_pages_hold_what_was_appended(causal: bool, row_normalise: float | None) -> None:
    cache = PagedCache(3, 2, 8, pages=9, page_size=16)
    parts: list[list[tuple[Tensor, Tensor]]] = [[], [], []]
    for counts in ([20, 3, 0], [1, 1, 1], [15, 0, 33], [1, 1, 1]):
        keys, values = tokens(counts)
        cache.append(keys, values, counts)
        for row, count in enumerate(counts):
            parts[row].append((keys[row, :, :count], values[row, :, :count]))
    assert cache.lengths.tolist() == [37, 5, 35]
    q = torch.randn(3, 4, 3, 8)
    options: dict[str, Any] = {
        "gamma": torch.rand(4) + 0.5, "threshold": -0.2, "power": 2, "row_normalise": row_normalise
    }  # fmt: skip
    found = decode_attention(q, cache, causal=causal, **options)
    torch.testing.assert_close(found, one_by_one(q, parts, causal=causal, **options))


def test_a_sequence_without_keys_gives_zeros() -> None:
    cache = PagedCache(2, 1, 8, pages=2, page_size=16)
    keys, values = tokens([4, 0], kv_heads=1)
    cache.append(keys, values, [4, 0])
    for row_normalise in (None, 0.1):
        out = decode_attention(
            torch.randn(2, 2, 1, 8), cache, threshold=-1.0, row_normalise=row_normalise
        )
        assert out[0].any()
        assert not out[1].any()


def test_released_pages_are_used_again() -> None:
    cache = PagedCache(2, 1, 8, pages=3, page_size=16)
    large = torch.full((2, 1, 17, 8), 100.0)
    cache.append(large, large, [17, 0])
    with pytest.raises(UserError, match="1 are free"):
        cache.reserve([17, 17])
    cache.release(0)
    small = torch.rand(2, 1, 40, 8)
    cache.append(small, small, [0, 40])
    assert cache.lengths.tolist() == [0, 40]
    keys, _ = cache.dense()
    assert torch.equal(keys[1, :, :40], small[1])
    assert not keys[0].any()
    assert not keys[1, :, 40:].any()


def test_the_host_learns_what_replays_appended() -> None:
    cache = PagedCache(1, 1, 8, pages=4, page_size=16)
    cache.append(*tokens([10], kv_heads=1))
    cache.reserve(17)
    # What a replayed graph does: the device's work alone.
    keys, values = tokens([1], kv_heads=1)
    for _ in range(7):
        cache._write(keys, values, None)
        cache.lengths.add_(1)
    cache.advance(7)
    cache.append(keys, values)
    dense, _ = cache.dense()
    assert cache.lengths.tolist() == [18]
    assert torch.equal(dense[:, :, 10:18], keys.expand(-1, -1, 8, -1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 24}, r"page_size must be one of .*, got 24"),
        ({"pages": 0}, "pages must be at least 1, got 0"),
        ({"max_length": 0}, "max_length must be at least 1, got 0"),
        ({"dtype": torch.int8}, "dtype must be a floating-point type"),
    ],
)
def test_refuses_a_cache_that_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        PagedCache(2, 2, 8, **{"pages": 4, **change})


def test_refuses_tokens_that_do_not_fit() -> None:
    cache = PagedCache(2, 2, 8, pages=4, page_size=16, max_length=20)
    keys, values = tokens([4, 4])
    with pytest.raises(UserError, match=r"values must be torch.float32 of shape \[2, 2, 4, 8\]"):
        cache.append(keys, values[:, :, 1:])
    with pytest.raises(UserError, match="keys must be torch.float32"):
        cache.append(keys.half(), values)
    with pytest.raises(UserError, match="counts must be at most T = 4, got"):
        cache.append(keys, values, [5, 0])
    with pytest.raises(UserError, match="counts must be 2 numbers of at least 0"):
        cache.append(keys, values, [1])
    with pytest.raises(UserError, match="at most max_length 20"):
        cache.append(*tokens([21, 0]))
    assert cache.lengths.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((1, 4, 1, 8), {}, r"q must have shape \[2, H, Tq, 8\]"),
        ((2, 3, 1, 8), {}, "multiple of the cache's 2, got 3"),
        ((2, 4, 1, 8), {"gamma": torch.ones(3)}, "gamma must be a number or a tensor"),
        ((2, 4, 1, 8), {"gamma": -1.0}, "gamma must be a finite number greater than 0"),
        ((2, 4, 1, 8), {"row_normalise": 0.0}, "row_normalise must be a finite number above 0"),
        ((2, 4, 1, 8), {"impl": "fast"}, "impl must be one of auto, triton, reference, got 'fast'"),
    ],
)
def test_refuses_queries_that_do_not_fit(
    shape: tuple[int, ...], options: dict[str, Any], message: str
) -> None:
    cache = PagedCache(2, 2, 8, pages=4)
    with pytest.raises(UserError, match=message):
        decode_attention(torch.randn(shape), cache, **options)
    with pytest.raises(UserError, match="q must be torch.float32 on cpu"):
        decode_attention(torch.randn(2, 4, 1, 8).half(), cache)


def test_the_reference_has_gradients_and_triton_says_that_it_has_none() -> None:
    cache = PagedCache(1, 1, 16, pages=1)
    cache.append(*tokens([5], kv_heads=1, width=16))
    q = torch.randn(1, 1, 1, 16, requires_grad=True)
    (grad,) = torch.autograd.grad(decode_attention(q, cache).sum(), q)
    assert grad.isfinite().all() and math.isfinite(float(grad.norm()))
    with pytest.raises(UserError, match="cannot run this decode_attention: it has no gradients"):
        decode_attention(q, cache, impl="triton")
