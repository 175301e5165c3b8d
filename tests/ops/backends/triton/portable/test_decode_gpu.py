"""Decoding on a GPU (`pytest -m gpu`): all widths, dtypes and tiles, long caches, CUDA graphs."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from reluformer import PagedCache, decode_attention, relu_attention
from reluformer.ops.backends.triton import launch, op, tuning
from reluformer.ops.backends.triton.tuning import Tile
from tests.ops.backends.triton.portable.test_decode import CASES, NAN, decoded, results, zero_rows
from tests.ops.backends.triton.test_gpu import BOUNDS, LOOSE, check_or_refusal
from tests.ops.rectified import Case, arguments, error, expected

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_formula(case: Case, dtype: torch.dtype) -> None:
    check_or_refusal(case, dtype)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("width", op.WIDTHS)
def test_every_tile(width: int, dtype: torch.dtype) -> None:
    shape = Case("tile", batch=2, heads=8, keys=3001, width=width, value_width=width)
    padded = 128 if width == 96 else width
    for tile in tuning.every("decode", padded, dtype.itemsize):
        for skip in (True, False):
            # A key head has 4, 12 or 64 query rows, so that every size of the row tile is used.
            for queries in (1, 3, 16):
                case = replace(shape, queries=queries, statistics=int(skip))
                given = arguments(case, dtype, "cuda")
                found = results(given, replace(tile, skip=skip))
                again = results(given, replace(tile, skip=skip))
                for one, other, wanted in zip(found, again, expected(given)[0], strict=True):
                    assert error(one, wanted) <= BOUNDS[dtype][0]
                    assert torch.equal(one, other)


@pytest.mark.parametrize("queries", [1, 8])
def test_values_without_weight_are_never_read(queries: int) -> None:
    case = Case("skip", batch=2, heads=8, queries=queries, keys=5000, width=128, value_width=128)
    given = arguments(case, torch.bfloat16, "cuda")
    with torch.no_grad():
        given.leaves["q"].abs_()
        sign = torch.where(torch.rand(2, 2, 5000, 1, device="cuda") < 0.8, -1, 1)
        given.leaves["k"].abs_().mul_(sign)
    tile = Tile(16, 64, 4, 3)
    wanted = decoded(given, replace(tile, skip=False))
    with torch.no_grad():
        given.leaves["v"].masked_fill_(zero_rows(given)[..., None], NAN)
    assert torch.equal(decoded(given, tile), wanted)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("queries", [1, 300])
def test_a_nan_key_reaches_the_output(queries: int, power: int, dtype: torch.dtype) -> None:
    q, k, v = torch.randn(3, 1, 2, 300, 64, device="cuda", dtype=dtype).unbind()
    k[0, 0, 20] = NAN
    with tuning.override(hopper=False):
        out = relu_attention(q[:, :, :queries], k, v, power=power, impl="triton")
    assert out[0, 0].isnan().all() and out[0, 1].isfinite().all()


def filled(page_size: int, dtype: torch.dtype, width: int = 64) -> PagedCache:
    """Three sequences of up to 4000 keys in a cache whose unused memory is NaN."""
    lengths = [4000, 1, 777]
    cache = PagedCache(
        3, 2, width, pages=300 * 16 // page_size + 3, page_size=page_size, max_length=4096,
        dtype=dtype, device="cuda",
    )  # fmt: skip
    cache.keys.fill_(NAN)
    cache.values.fill_(NAN)
    centres = torch.randn(3, 2, 4096 // page_size, width, device="cuda")
    keys = centres.repeat_interleave(page_size, dim=2)[:, :, :4000]
    keys = (keys + 0.05 * torch.randn_like(keys)).to(dtype)
    cache.append(keys, torch.randn_like(keys), lengths)
    return cache


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize("queries", [1, 5])
def test_pages(page_size: int, queries: int, dtype: torch.dtype) -> None:
    q = torch.randn(3, 8, queries, 64, device="cuda").to(dtype)
    options: dict[str, Any] = {
        "threshold": 0.3, "gamma": torch.rand(8, device="cuda") + 0.5,
        "row_normalise": 0.01 if queries > 1 else None,
    }  # fmt: skip
    cache = filled(page_size, dtype)
    found = decode_attention(q, cache, impl="triton", **options)
    wanted = decode_attention(q, cache, impl="reference", **options)
    assert error(found, wanted) <= 2 * LOOSE[dtype][0]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("width", [32, 96, 256])
def test_append_stores_what_the_reference_stores(width: int, dtype: torch.dtype) -> None:
    caches = []
    for impl in ("triton", "reference"):
        torch.manual_seed(0)
        cache = PagedCache(2, 2, width, pages=40, page_size=64, dtype=dtype, device="cuda")
        for counts in ([700, 3], [1, 1], [64, 500], [1, 0]):
            keys, values = (torch.randn(2, 2, 700, width, device="cuda").to(dtype) for _ in "kv")
            cache.append(keys, values, counts, impl=impl)
        caches.append(cache)
    one, other = caches
    assert torch.equal(one.lengths, other.lengths)
    for mine, theirs in zip(one.dense(), other.dense(), strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(one.table, other.table)


def test_steps_captured_in_a_graph() -> None:
    def cache() -> PagedCache:
        torch.manual_seed(0)
        made = PagedCache(2, 2, 64, pages=16, page_size=64, dtype=torch.bfloat16, device="cuda")
        made.reserve(400)
        start = torch.randn(2, 2, 100, 64, device="cuda").bfloat16()
        made.append(start, start, [100, 37])
        return made

    steps = torch.randn(200, 2, 2, 1, 64, device="cuda").bfloat16()
    plain, recorded = cache(), cache()
    key = steps[0].clone()

    def step(target: PagedCache) -> Tensor:
        target.append(key, key)
        return decode_attention(key.repeat_interleave(2, dim=1), target, impl="triton")

    step(cache())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(recorded)
    # Recording a graph runs no kernel, but the host has counted one step.
    for new in steps:
        key.copy_(new)
        graph.replay()
        assert torch.equal(out, step(plain))
    assert torch.equal(recorded.lengths, plain.lengths)


def test_new_lengths_neither_compile_nor_synchronise() -> None:
    from reluformer.ops.backends.triton.portable.decode import decode_kernel

    def kernels() -> int:
        return sum(len(cache[0]) for cache in decode_kernel.device_caches.values())

    keys = torch.randn(1, 2, 20000, 64, device="cuda").bfloat16()
    q = torch.randn(1, 4, 1, 64, device="cuda").bfloat16()
    torch.cuda.synchronize()
    launch.SIZED_LAUNCHES.clear()
    before = 0
    torch.cuda.set_sync_debug_mode("error")
    try:
        for length in (16, 1, 17, 640, 641, 16384, 20000):
            part = keys[:, :, :length]
            out = relu_attention(q, part, part)
            before = before or kernels()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert kernels() == before
    assert {key[0] for key in launch.SIZED_LAUNCHES} == {"decode", "combine"}
    assert all(
        each.direct is not None
        for name, each in launch.SIZED_LAUNCHES.items()
        if name[0] == "decode"
    )
    wanted = relu_attention(q, keys, keys, impl="reference")
    assert error(out, wanted) <= LOOSE[torch.bfloat16][0]
