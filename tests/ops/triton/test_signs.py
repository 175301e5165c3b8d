"""Gradients of queries from the signs of the weights that the keys' kernel leaves, a bit each."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from reluformer.ops.triton import launch, op, tiles
from reluformer.ops.triton.problem import Problem
from reluformer.ops.triton.tiles import Tile
from tests.ops.rectified import Case, arguments, check, found

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off")
# Statistics and per-head gradients come from sums of rounded terms.
LOOSE = {torch.bfloat16: (9e-3, 18e-3), torch.float16: (3e-3, 6e-3)}
ODD = Case("plain", queries=83, keys=77)
CASES = [
    ODD,
    replace(ODD, name="causal", causal=True, statistics=1),
    replace(ODD, name="more keys", keys=150, causal=True, gamma=True),
    replace(ODD, name="more queries", queries=150, causal=True),
    replace(ODD, name="window", causal=True, window=9),
    replace(ODD, name="both sides", window=9, threshold=(-0.4, 0.3)),
    replace(ODD, name="lengths", batch=3, key_lengths=(70, 0, 33), threshold=(-0.4, 0.3)),
    replace(ODD, name="groups", heads=4, kv_heads=2, threshold=(-0.4, 0.3, 0.0, 9.0)),
    replace(ODD, name="divided", gamma=True, statistics=1, threshold=-0.2, normalise=1e-2),
]


@on_cpu
@pytest.mark.parametrize("at", range(len(CASES)), ids=lambda at: CASES[at].name)
def test_gradients_from_signs(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = _spy(monkeypatch)
    # Blocks of 64 queries and 64 keys: tiles of one and of two such, in either kernel.
    keys, queries = ((64, 128), (128, 64), (64, 64))[at % 3]
    small: dict[tiles.Kernel, Tile] = {
        "forward": Tile(16, 32, 4, 1),
        "keys": Tile(keys, (64, 128)[at % 2], 4, 1, one_loop=at % 4 == 3, prescale=at % 2 == 0),
        "queries": Tile(queries, (128, 64)[at // 2 % 2], 4, 1, one_loop=at % 4 == 3),
    }
    with tiles.override(small, tma=at % 2 > 0, signs=True):
        check(op.rectified_attention, arguments(CASES[at], torch.float32, "cpu"), 2e-6, 5e-6)
    assert made


def _spy(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The buffers of signs that are made from now on."""
    made: list[torch.Tensor] = []
    original = launch.sign_buffer

    def spy(*given: Any) -> torch.Tensor | None:
        signs = original(*given)
        if signs is not None:
            made.append(signs)
        return signs

    monkeypatch.setattr(launch, "sign_buffer", spy)
    return made


def _buffer(n: int, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> torch.Tensor | None:
    q = torch.empty(1, 2, n, 64, dtype=dtype, device="meta")
    numbers = (0.125, 1.0, 0.0, 0.5, 1, False, 0, 0.0, n, n)
    problem = Problem(q, q, q, *[None] * 7, *numbers)._replace(**changes)
    return launch.sign_buffer(problem, launch.Gradients(None, None, q, None, None))


def test_where_signs_are_kept() -> None:
    assert _buffer(4100) is None, "nobody asked"
    mask = torch.ones(1, dtype=torch.bool)
    none: list[dict[str, Any]] = [{"power": 2}, {"dropout_p": 0.1}, {"mask": mask}]
    with tiles.override(signs=True):
        signs = _buffer(4100)
        assert all(_buffer(4000, **changes) is None for changes in none)
    assert signs is not None
    # Padded to whole tiles, a bit for every pair of a query and a key; and what readers run ahead.
    assert signs.numel() * 16 == 2 * 4352 * 4224 + 8 * 64 * 64
    with tiles.override({"queries": Tile(32, 64, 4, 1)}, signs=True):
        assert _buffer(4000) is None, "part of a block"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("at", range(len(CASES)), ids=lambda at: CASES[at].name)
def test_gradients_from_signs_on_the_device(at: int, width: int, dtype: torch.dtype) -> None:
    case = replace(CASES[at], width=width, value_width=width)
    # The table's tiles for long calls, on lengths that none of them divides.
    case = replace(case, queries=16 * case.queries - 5, keys=16 * case.keys - 3)
    if case.key_lengths is not None:
        case = replace(case, key_lengths=tuple(16 * length for length in case.key_lengths))
    given = arguments(case, dtype, "cuda")
    with tiles.override(signs=True):
        check(op.rectified_attention, given, *LOOSE[dtype])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_signs_change_nothing_but_rounding() -> None:
    given = arguments(
        replace(ODD, queries=2000, keys=2000, width=64, causal=True), torch.bfloat16, "cuda"
    )
    grads = []
    for signs in (True, False):
        with tiles.override(signs=signs):
            grads.append(found(op.rectified_attention, given)[1])
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in ("k", "v"))
    torch.testing.assert_close(grads[0]["q"], grads[1]["q"], rtol=0.02, atol=0.02)
