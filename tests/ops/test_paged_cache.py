"""The paged cache and the reference of `decode_attention`, on any machine."""

import math
from typing import Any

import numpy as np
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_cpu_reads_the_pages_in_use(
    rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = PagedCache(2, 2, 8, pages=9, page_size=16, dtype=dtype)
    # Nothing reads what a page holds past the length of its sequence.
    cache.keys.fill_(NAN)
    cache.values.fill_(NAN)
    keys, values = (each.to(dtype) for each in tokens([33, 2]))
    cache.append(keys, values, [33, 2])
    q = torch.randn(2, 4, rows, 8, dtype=dtype)
    options: dict[str, Any] = {"threshold": -0.5, "row_normalise": 0.1}
    wanted = decode_attention(q, cache, impl="reference", **options)
    monkeypatch.setattr(cache, "dense", None)
    torch.testing.assert_close(decode_attention(q, cache, **options), wanted)


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
    # A replayed graph repeats the work of the device only.
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
        ({"page_size": 16.0}, r"page_size must be one of .*, got 16.0"),
        ({"page_size": "16"}, r"page_size must be one of .*, got '16'"),
        ({"pages": 0}, "pages must be a whole number from 1 to 2147483647, got 0"),
        ({"pages": -1}, "pages must be a whole number .* got -1"),
        ({"pages": 2**31}, "pages must be a whole number .* got 2147483648"),
        ({"pages": 2.5}, "pages must be a whole number .* got 2.5"),
        ({"pages": None}, "pages must be a whole number .* got None"),
        ({"batch": "2"}, "batch must be a whole number .* got '2'"),
        ({"kv_heads": 2.0}, "kv_heads must be a whole number .* got 2.0"),
        ({"width": None}, "width must be a whole number .* got None"),
        ({"value_width": 1.5}, "value_width must be a whole number .* got 1.5"),
        ({"max_length": 0}, "max_length must be a whole number .* got 0"),
        ({"max_length": 2.5}, "max_length must be a whole number .* got 2.5"),
        ({"dtype": torch.int8}, "dtype must be a floating-point type"),
        ({"dtype": "float32"}, "dtype must be a floating-point type, got 'float32'"),
        ({"device": "gpu"}, "device must be one that torch can use, got 'gpu'"),
        ({"device": "cuda:999"}, "device must be one that torch can use, got 'cuda:999'"),
        ({"device": 3.5}, "device must be one that torch can use, got 3.5"),
    ],
)
def test_refuses_a_cache_that_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        PagedCache(**{"batch": 2, "kv_heads": 2, "width": 8, "pages": 4, **change})


def test_sizes_may_be_integers_of_numpy_and_torch() -> None:
    sizes = {"batch": np.int64(2), "kv_heads": np.int32(2), "width": torch.tensor(8)}
    cache = PagedCache(**sizes, pages=np.int64(4), page_size=np.int64(16))
    keys, values = tokens([4, 4])
    for counts in (np.array([1, 2]), torch.tensor([1, 2]), (1, 2)):
        cache.append(keys, values, counts)
    assert cache.lengths.tolist() == [3, 6]
    assert [type(size) for size in (cache.page_size, cache.max_length)] == [int, int]


def test_refuses_tokens_that_do_not_fit() -> None:
    cache = PagedCache(2, 2, 8, pages=4, page_size=16, max_length=20)
    keys, values = tokens([4, 4])
    with pytest.raises(UserError, match=r"values must be torch.float32 of shape \[2, 2, 4, 8\]"):
        cache.append(keys, values[:, :, 1:])
    with pytest.raises(UserError, match="keys must be torch.float32"):
        cache.append(keys.half(), values)
    with pytest.raises(UserError, match="counts must be at most T = 4, got"):
        cache.append(keys, values, [5, 0])
    with pytest.raises(UserError, match="at most max_length 20"):
        cache.append(*tokens([21, 0]))
    for wrong, got in ((None, "NoneType"), (keys.tolist(), "list")):
        with pytest.raises(UserError, match=f"keys must be a tensor, got {got}"):
            cache.append(wrong, values)
        with pytest.raises(UserError, match=f"values must be a tensor, got {got}"):
            cache.append(keys, wrong)
    with pytest.raises(UserError, match=r"keys must have shape \[B, Hkv, T, D\], got \[2, 4, 8\]"):
        cache.append(keys[0], values)
    with pytest.raises(UserError, match="values must be on cpu as the cache is"):
        cache.append(keys, values.to("meta"))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UserError, match="must be a tensor"):
        cache.append(None, values)
    assert cache.lengths.tolist() == [0, 0]


@pytest.mark.parametrize(
    "numbers", [[1], [1, 2, 3], [], -1, [-1, 2], 1.5, [1.5, 2], [None, 1], "12", None, [[1], [2]]]
)
def test_refuses_counts_that_are_no_whole_numbers(numbers: Any) -> None:
    cache = PagedCache(2, 2, 8, pages=4, page_size=16)
    cache.reserve(16)
    rule = "must be 2 whole numbers of at least 0, or one for all sequences, got"
    with pytest.raises(UserError, match=f"tokens {rule}"):
        cache.reserve(numbers)
    with pytest.raises(UserError, match=f"tokens {rule}"):
        cache.advance(numbers)
    if numbers is not None:
        with pytest.raises(UserError, match=f"counts {rule}"):
            cache.append(*tokens([4, 4]), numbers)
    assert cache.lengths.tolist() == [0, 0]


def test_a_full_cache_stays_as_it_was() -> None:
    cache = PagedCache(2, 2, 8, pages=2, page_size=16)
    cache.append(*tokens([16, 16]))
    before = [tensor.clone() for tensor in cache.dense()]
    with pytest.raises(UserError, match="2 more are needed and 0 are free"):
        cache.append(*tokens([1, 1]))
    with pytest.raises(UserError, match=r"must fit the reserved pages, .* \[16, 16\] tokens, got"):
        cache.advance([0, 1])
    for one, other in zip(cache.dense(), before, strict=True):
        assert torch.equal(one, other)
    cache.release(1)
    cache.append(*tokens([0, 16]), [0, 16])
    assert cache.lengths.tolist() == [16, 16]


@pytest.mark.parametrize("sequence", [-1, 2, 10**30, 1.0, "0", None, [0], slice(0, 1)])
def test_refuses_to_release_what_is_no_sequence(sequence: Any) -> None:
    cache = PagedCache(2, 2, 8, pages=4, page_size=16)
    cache.append(*tokens([4, 4]))
    with pytest.raises(UserError, match="sequence must be a whole number from 0 to 1, got"):
        cache.release(sequence)
    assert cache.lengths.tolist() == [4, 4]


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((1, 4, 1, 8), {}, r"q must have shape \[2, H, Tq, 8\]"),
        ((2, 3, 1, 8), {}, "multiple of the cache's 2, got 3"),
        ((2, 4, 1, 8), {"gamma": torch.ones(3)}, "gamma must be a number or a tensor"),
        ((2, 0, 1, 8), {}, "multiple of the cache's 2, got 0"),
        ((2, 4, 1, 8), {"gamma": "1"}, "gamma must be a number or a tensor .* got '1'"),
        ((2, 4, 1, 8), {"gamma": None}, "gamma must be a number or a tensor .* got None"),
        ((2, 4, 1, 8), {"threshold": [0.5]}, r"threshold must be a number or .* got \[0.5\]"),
        ((2, 4, 1, 8), {"scale": "1"}, "scale must be a finite number, got '1'"),
        ((2, 4, 1, 8), {"scale": torch.tensor(1.0), "impl": "triton"}, "scale must be a finite"),
        ((2, 4, 1, 8), {"scale": math.inf, "impl": "triton"}, "scale must be a finite number"),
        ((2, 4, 1, 8), {"causal": "yes"}, "causal must be True or False, got 'yes'"),
        ((2, 4, 1, 8), {"gamma": -1.0}, "gamma must be a finite number greater than 0"),
        ((2, 4, 1, 8), {"row_normalise": 0.0}, "row_normalise must be a finite number of at least"),
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


def test_refuses_what_is_no_tensor_and_no_cache() -> None:
    cache = PagedCache(2, 2, 8, pages=4)
    for wrong in (None, [1.0], np.zeros((2, 4, 1, 8))):
        with pytest.raises(UserError, match=f"q must be a tensor, got {type(wrong).__name__}"):
            decode_attention(wrong, cache)
        with pytest.raises(UserError, match="cache must be a PagedCache, got"):
            decode_attention(torch.randn(2, 4, 1, 8), wrong)


def test_the_reference_has_gradients_and_triton_says_that_it_has_none() -> None:
    cache = PagedCache(1, 1, 16, pages=1)
    cache.append(*tokens([5], kv_heads=1, width=16))
    q = torch.randn(1, 1, 1, 16, requires_grad=True)
    (grad,) = torch.autograd.grad(decode_attention(q, cache).sum(), q)
    assert grad.isfinite().all() and math.isfinite(float(grad.norm()))
    with pytest.raises(UserError, match="cannot run this decode_attention: it has no gradients"):
        decode_attention(q, cache, impl="triton")
