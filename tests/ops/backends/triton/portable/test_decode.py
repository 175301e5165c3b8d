"""Decoding: few rows, many keys. NaN in memory that must not be read shows every read."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from reluformer import PagedCache, ReLUFormer, decode_attention, relu_attention
from reluformer.ops.backends.triton import launch, op, run_decode, tuning
from reluformer.ops.backends.triton.operators import flatten
from reluformer.ops.backends.triton.problem import NO_INPUTS, Problem, Settings
from reluformer.ops.backends.triton.tuning import Tile
from reluformer.translation.search import SearchConfig, search
from tests.model.factory import small
from tests.ops.backends.triton.test_op import on_cpu
from tests.ops.rectified import Arguments, Case, arguments, check, error, expected, run_kernel

NAN = float("nan")
SPLIT, WHOLE = Tile(16, 16, 4, 1, programs=2), Tile(16, 32, 4, 1, programs=0)

CASES = [
    Case("one query", queries=1, keys=70),
    Case("groups", batch=2, heads=6, queries=3, causal=True, gamma=True, threshold=(0.4, -0.3) * 3),
    Case("more rows than a tile", heads=20, kv_heads=1, queries=2, causal=True, statistics=1),
    Case(
        "mask, one row blind",
        heads=4,
        queries=5,
        mask=(1, 1, 5, 45),
        gamma=True,
        threshold=-0.1,
        statistics=1,
    ),
    Case("mask of heads", batch=2, queries=2, mask=(2, 2, 2, 45), power=2),
    Case(
        "padding, nothing",
        batch=2,
        queries=2,
        key_lengths=(0, 40),
        power=2,
        threshold=-0.2,
        statistics=1,
    ),
    Case(
        "groups, power four",
        heads=4,
        queries=3,
        power=4,
        gamma=True,
        threshold=-3.0,
        causal=True,
        statistics=1,
    ),
    Case("power four", queries=2, power=4, threshold=(-4.0, 0.2), mask=(1, 1, 2, 45), statistics=1),
    Case("causal padding", batch=2, queries=4, key_lengths=(45, 43), causal=True),
    Case("causal window", queries=4, keys=90, window=20, causal=True, statistics=1),
    Case("window", queries=3, keys=50, window=7, length_exponent=1.0),
    Case("fewer keys than queries", queries=9, keys=5, causal=True),
    Case("widths", queries=2, width=96, value_width=32, length_exponent=0.0),
    Case(
        "row-normalised",
        heads=4,
        queries=3,
        power=4,
        threshold=-1.0,
        causal=True,
        row_normalise=1e-4,
    ),
    Case(
        "row-normalised, mask",
        queries=5,
        mask=(1, 1, 5, 45),
        gamma=True,
        statistics=1,
        row_normalise=0.1,
    ),
    Case(
        "normalised, padding, nothing",
        batch=2,
        queries=2,
        key_lengths=(0, 40),
        gamma=True,
        threshold=(3.0, -0.2),
        row_normalise=0.1,
    ),
]


def decoded(given: Arguments, tile: Tile) -> Tensor:
    """The output of the decoding kernel."""
    return results(given, tile)[0]


def results(given: Arguments, tile: Tile) -> list[Tensor]:
    """Output and requested row sums of the decoding kernel; fails if another kernel runs."""
    q, k, v = (given.leaves[name].detach() for name in "qkv")
    options = {
        name: value.detach() if isinstance(value, Tensor) else value
        for name, value in given.options.items()
    }
    launch.SIZED_LAUNCHES.clear()
    with tuning.override({"decode": tile}):
        found = run_kernel(op.attend, q, k, v, options)
    assert {key[0] for key in launch.SIZED_LAUNCHES} == {"decode", "combine"}
    return [each for each in found if each is not None]


@on_cpu
@pytest.mark.parametrize("at", range(len(CASES)), ids=lambda at: CASES[at].name)
def test_matches_the_formula(at: int) -> None:
    given = arguments(CASES[at], torch.float32, "cpu", transposed=at % 2 == 0)
    # Masks and row normalisation with and without a split: counts and sums are combined too.
    both = CASES[at].mask is not None or CASES[at].row_normalise is not None
    for tile in (SPLIT, WHOLE) if both else (WHOLE if at % 3 == 2 else SPLIT,):
        for found, wanted in zip(results(given, tile), expected(given)[0], strict=True):
            assert error(found, wanted) <= 1e-6


@on_cpu
def test_float16() -> None:
    # The interpreter cannot multiply bfloat16.
    given = arguments(Case("half", queries=2, keys=50, threshold=0.1), torch.float16, "cpu")
    assert error(decoded(given, SPLIT), expected(given)[0][0]) <= 2e-3


@on_cpu
@pytest.mark.parametrize("row_normalise", [None, 0.1], ids=["plain", "row-normalised"])
@pytest.mark.parametrize("mask", [None, (1, 2, 3, 45)], ids=["plain", "mask"])
def test_gradients_of_a_decoded_output(
    mask: tuple[int, ...] | None, row_normalise: float | None
) -> None:
    case = Case("gradients", queries=3, mask=mask, gamma=True, threshold=(0.1, -0.1))
    case = replace(case, statistics=int(row_normalise is None), row_normalise=row_normalise)
    with tuning.override({"decode": SPLIT, **dict.fromkeys(("dkv", "dq"), Tile(16, 16, 4, 1))}):
        check(op.attend, arguments(case, torch.float32, "cpu"), 2e-6, 5e-6)


def test_when_the_decoding_kernel_runs() -> None:
    x = torch.zeros(1, 2, 16, 16)

    def problem(q: Tensor, dropout_p: float = 0.0, cu: Tensor | None = None) -> Problem:
        settings = Settings(1.0, q.shape[2], 16, dropout_p=dropout_p)
        return Problem(q, x, x, NO_INPUTS._replace(cu_q=cu, cu_k=cu), settings)

    assert run_decode.should_use(problem(x))
    assert not run_decode.should_use(problem(torch.zeros(1, 2, 17, 16)))
    assert not run_decode.should_use(problem(x, dropout_p=0.1))
    assert not run_decode.should_use(problem(x, cu=torch.tensor([0, 16])))


@on_cpu
def test_a_growing_cache_reuses_its_launches() -> None:
    launch.SIZED_LAUNCHES.clear()
    keys = torch.randn(1, 2, 128, 16)
    with tuning.override({"decode": SPLIT}):
        for length in (3, 16, 33, 127):
            q, k = torch.randn(1, 4, 1, 16), keys[:, :, :length]
            mask = torch.ones(1, 1, 1, length, dtype=torch.bool)
            out = relu_attention(q, k, k, mask=mask, impl="triton")
            torch.testing.assert_close(out, relu_attention(q, k, k, impl="reference"))
    assert len(launch.SIZED_LAUNCHES) == 2


@on_cpu
@pytest.mark.parametrize(
    "options", [{}, {"power": 4, "row_normalise": 0.01}], ids=["plain", "normalised"]
)
def test_beam_search_uses_the_decoding_kernel(options: dict[str, float]) -> None:
    found = []
    for impl in ("reference", "triton"):
        torch.manual_seed(0)
        model = ReLUFormer(
            small(
                width=32,
                heads=2,
                encoder_layers=1,
                decoder_layers=1,
                attention_impl=impl,
                attention_options=options,
            )  # fmt: skip
        ).eval()
        launch.SIZED_LAUNCHES.clear()
        with tuning.override({"decode": SPLIT}):
            found.append(search(model, [[5, 6, 7]], SearchConfig(beam=3, max_extra=1)))
    for one, other in zip(*found, strict=True):
        assert one.tokens == other.tokens
        assert one.score == pytest.approx(other.score, abs=1e-5)
    assert {key[0] for key in launch.SIZED_LAUNCHES} == {"decode", "combine"}


def zero_rows(given: Arguments) -> Tensor:
    """[B, Hkv, Tk]: whether a value has zero weight for all rows of its group."""
    q, k = (given.leaves[name].detach().double() for name in "qk")
    group = q.shape[1] // k.shape[1]
    score = q.unflatten(1, (-1, group)) @ k.unsqueeze(2).transpose(-2, -1)
    return (score <= 0).all(3).all(2)


@on_cpu
def test_values_without_weight_are_never_read() -> None:
    case = Case("skip", batch=2, heads=2, kv_heads=1, queries=2, keys=70, key_lengths=(70, 50))
    given = arguments(case, torch.float32, "cpu")
    with torch.no_grad():
        # A whole tile without weight, and single rows elsewhere.
        given.leaves["q"].abs_()
        given.leaves["k"][:, :, 16:32].abs_().neg_()
        given.leaves["k"][:, :, 40:44].abs_().neg_()
    dead = zero_rows(given)
    assert bool(dead[:, :, 16:32].all()) and 0.3 < float(dead.double().mean()) < 0.9
    wanted = decoded(given, Tile(16, 16, 4, 1, skip=False))
    assert torch.equal(decoded(given, SPLIT), wanted)
    with torch.no_grad():
        given.leaves["v"].masked_fill_(dead[..., None], NAN)
        for name in "kv":
            given.leaves[name][1, :, 50:] = NAN
    assert torch.equal(decoded(given, SPLIT), wanted)
    # Control: a kernel that reads all values returns NaN.
    assert decoded(given, Tile(16, 16, 4, 1, skip=False)).isnan().any()


@on_cpu
@pytest.mark.parametrize("power", [1, 4])
def test_a_nan_key_reaches_the_output(power: int) -> None:
    given = arguments(Case("nan", queries=1, power=power), torch.float32, "cpu")
    with torch.no_grad():
        given.leaves["k"][0, 0, 20] = NAN
    for skip in (False, True):
        assert decoded(given, Tile(16, 16, 4, 1, skip=skip)).isnan()[0, 0].any()


def cache_of(
    lengths: list[int], page_size: int = 16, width: int = 16, clusters: bool = False, **options: Any
) -> PagedCache:
    """A filled cache whose unused memory is NaN; the pages of the sequences are interleaved."""
    pages = sum(-(-length // page_size) for length in lengths)
    cache = PagedCache(
        len(lengths), 2, width, pages=pages, page_size=page_size,
        max_length=max(lengths) + page_size, **options,
    )  # fmt: skip
    done = [0] * len(lengths)
    while done != lengths:
        new = [min(page_size, length - old) for length, old in zip(lengths, done, strict=True)]
        keys, values = (torch.randn(len(lengths), 2, page_size, width) for _ in range(2))
        if clusters:
            keys = 0.1 * keys + torch.randn(len(lengths), 2, 1, width)
        cache.append(*(x.to(cache.keys) for x in (keys, values)), new)
        done = [old + more for old, more in zip(done, new, strict=True)]
    return cache


@on_cpu
@pytest.mark.parametrize(
    ("page_size", "rows", "causal", "tile"),
    [
        (16, 1, True, SPLIT),
        # A tile of several pages, and a page of several tiles.
        (16, 3, True, Tile(16, 64, 4, 1, programs=8)),
        (32, 3, False, SPLIT),
        (16, 3, True, WHOLE),
        (32, 2, False, SPLIT),
    ],
)
def test_pages(page_size: int, rows: int, causal: bool, tile: Tile) -> None:
    cache = cache_of([70, 0, 2], page_size)
    q = torch.randn(3, 4, rows, 16)
    options: dict[str, Any] = {
        "gamma": torch.rand(4) + 0.5, "threshold": torch.tensor([0.3, -0.2, 0.0, 0.5]),
        "power": 2 if rows == 1 else 4, "causal": causal,
        "row_normalise": 0.01 if rows > 1 else None,
    }  # fmt: skip
    with tuning.override({"decode": tile}):
        found = decode_attention(q, cache, impl="triton", **options)
    wanted = decode_attention(q, cache, impl="reference", **options)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert not found[1].any()


@on_cpu
def test_append_stores_what_the_reference_stores() -> None:
    def cache() -> PagedCache:
        return PagedCache(2, 1, 16, pages=6, page_size=16, value_width=32, max_length=70)

    found, wanted = cache(), cache()
    for counts in ([20, 3], [1, 0], [10, 33], [1, 1]):
        keys, values = torch.randn(2, 1, 33, 16), torch.randn(2, 1, 33, 32)
        if counts == [1, 0]:
            keys[0, 0, 0, 3] = NAN
        found.append(keys, values, counts, impl="triton")
        wanted.append(keys, values, counts, impl="reference")
    assert torch.equal(found.lengths, wanted.lengths)
    for one, other in zip(found.dense(), wanted.dense(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@on_cpu
@pytest.mark.parametrize("row_normalise", [0.0, 0.1])
def test_operator_for_pages_is_well_formed(row_normalise: float) -> None:
    cache = cache_of([20, 7])
    optional = NO_INPUTS._replace(gamma=torch.ones(4), key_lengths=cache.lengths)
    settings = Settings(0.25, 2, 32, threshold_value=0.1, causal=True, row_normalise=row_normalise)
    problem = Problem(torch.randn(2, 4, 2, 16), cache.keys, cache.values, optional, settings)
    torch.library.opcheck(
        torch.ops.reluformer.paged_attention.default,
        (*flatten(problem), cache.table),
        test_utils=("test_schema", "test_faketensor"),
    )
