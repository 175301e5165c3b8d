"""The kernel for all gradients at once: on the interpreter, and on the device under `-m gpu`."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from reluformer import relu_attention
from reluformer.ops.triton import launch, op, tiles
from reluformer.ops.triton.layout import empty_heads
from reluformer.ops.triton.tiles import Tile
from tests.ops.rectified import CASES, Arguments, Case, arguments, check, found
from tests.ops.triton.test_gpu import BOUNDS, LOOSE
from tests.ops.triton.test_op import (
    SMALL,
    _check_compiled,
    _check_dropout,
    _check_padding,
    _varlen,
)

if not torch.cuda.is_available():
    from tests.ops.triton import descriptors as descriptors

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
fast = partial(op.rectified_attention, deterministic=False)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows with every call of the kernel.

    Determinism, under which the suite's fresh memory is NaN, forbids the kernel: here it is off and
    what the launch allocates is poisoned by hand.
    """
    torch.use_deterministic_algorithms(False)
    calls: list[Any] = []

    def poisoned(make: Any) -> Any:
        def made(*given: Any, zero: bool = False, **keywords: Any) -> torch.Tensor:
            if make is empty_heads:
                keywords["zero"] = zero
            result: torch.Tensor = make(*given, **keywords)
            return result if zero or keywords.get("packed") else result.fill_(float("nan"))

        return made

    def counted(*given: Any) -> Any:
        calls.append(given)
        return original(*given)

    original = launch.fused_gradients
    monkeypatch.setattr(launch, "fused_gradients", counted)
    for name in ("empty_heads", "row_values"):
        monkeypatch.setattr(launch, name, poisoned(getattr(launch, name)))
    return calls


def _small(at: int) -> dict[tiles.Kernel, Tile]:
    """Every switch of a tile over the cases."""
    tile = Tile(
        16, 32, 4, 1, prescale=at % 2 > 0, one_loop=at % 4 == 1, order=at % 3, rotate=at % 5 > 2
    )
    return {"fused": tile, "forward": SMALL["forward"]}


@on_cpu
@pytest.mark.parametrize("at", range(len(CASES)), ids=lambda at: CASES[at].name)
def test_matches_the_formula(at: int, fused: list[Any]) -> None:
    with tiles.override(_small(at), tma=True):
        given = arguments(CASES[at], torch.float32, "cpu", transposed=at % 2 > 0)
        check(fast, given, 2e-6, 5e-6)
    assert len(fused) == 1


@on_cpu
def test_float16(fused: list[Any]) -> None:
    case = Case("half", causal=True, threshold=0.1, gamma=True, statistics=2)
    with tiles.override(_small(2), tma=True):
        for normalise in (None, 0.01):
            half = replace(case, normalise=normalise)
            check(fast, arguments(half, torch.float16, "cpu"), 3e-3, 6e-3)
    assert len(fused) == 2


@on_cpu
@pytest.mark.parametrize("one_loop", [False, True])
def test_packed_sequences(
    one_loop: bool, fused: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = op.rectified_attention_varlen
    monkeypatch.setattr(op, "rectified_attention_varlen", partial(original, deterministic=False))
    small = _small(2)
    with tiles.override({**small, "fused": replace(small["fused"], one_loop=one_loop)}, tma=True):
        results = _varlen(torch.float32, 0.1 if one_loop else None)
    for actual, wanted in zip(results["found"], results["wanted"], strict=True):
        torch.testing.assert_close(actual.double(), wanted, rtol=1e-4, atol=1e-5)
    assert len(fused) == 1


@on_cpu
@pytest.mark.parametrize(("power", "normalise"), [(1, None), (4, None), (4, 0.1)])
def test_dropout(
    power: int, normalise: float | None, fused: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op, "rectified_attention", fast)
    with tiles.override(_small(1), tma=True):
        _check_dropout(power, normalise)
    assert len(fused) == 1


@on_cpu
@pytest.mark.parametrize("one_loop", [False, True])
def test_padding_may_hold_anything(one_loop: bool, fused: list[Any]) -> None:
    small = _small(2)
    with tiles.override({**small, "fused": replace(small["fused"], one_loop=one_loop)}, tma=True):
        _check_padding(fast, 0.1 if one_loop else None)
    assert len(fused) == 1


@on_cpu
def test_only_on_request_and_never_under_determinism(fused: list[Any]) -> None:
    given = arguments(CASES[1], torch.float32, "cpu")
    with tiles.override(_small(1), tma=True):
        found(op.rectified_attention, given)
        torch.use_deterministic_algorithms(True)
        try:
            found(fast, given)
        finally:
            torch.use_deterministic_algorithms(False)
        assert not fused
    with tiles.override({"forward": SMALL["forward"]}, tma=True):
        # Short keys, and float32: two kernels.
        found(fast, given)
    with tiles.override(_small(1), tma=False):
        # Without descriptors too.
        found(fast, given)
    assert not fused


@on_cpu
def test_public_function_and_compiler(fused: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with tiles.override(_small(2), tma=True):
        q = torch.randn(1, 2, 33, 16, requires_grad=True)
        wanted = torch.autograd.grad(relu_attention(q, q, q, impl="reference").square().sum(), q)
        for keyword in ({}, {"deterministic": False}):
            out = relu_attention(q, q, q, impl="triton", **keyword)
            torch.testing.assert_close(torch.autograd.grad(out.square().sum(), q), wanted)
            assert len(fused) == len(keyword)
        monkeypatch.setattr(op, "rectified_attention", fast)
        _check_compiled(arguments(CASES[10], torch.float32, "cpu"), "aot_eager")
        assert len(fused) == 3


def _long(case: Case, dtype: torch.dtype) -> Arguments:
    return arguments(replace(case, queries=283, keys=301), dtype, "cuda")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("edged", [False, True])
def test_on_the_device(edged: bool, width: int, dtype: torch.dtype, fused: list[Any]) -> None:
    tile = tiles.pick_fused(width, edged, 1 << 20, 2)
    assert tile is not None
    shape: dict[str, Any] = {"width": width, "value_width": width}
    with tiles.override({"fused": tile}):
        plain = Case("long", batch=2, **shape)
        for case in (plain, replace(plain, causal=True), replace(plain, key_lengths=(301, 77))):
            check(fast, _long(case, dtype), *BOUNDS[dtype])
            check(fast, _long(replace(case, normalise=0.01), dtype), *LOOSE[dtype])
        # float16 refuses higher powers.
        cases = [case for case in CASES if case.power <= 2 or dtype == torch.bfloat16]
        for case in cases:
            check(fast, arguments(replace(case, **shape), dtype, "cuda"), *LOOSE[dtype])
    assert len(fused) == 6 + len(cases)
