"""dQ from the signs of the weights, which the kernel for dK and dV stores, one bit each."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from reluformer.ops.backends.triton import backward_choice, op, run_backward, tuning
from reluformer.ops.backends.triton.problem import NO_INPUTS, Problem, Settings
from reluformer.ops.backends.triton.tuning import Tile
from tests.ops.backends.triton.problems import with_changes
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
    replace(ODD, name="divided", gamma=True, statistics=1, threshold=-0.2, row_normalise=1e-2),
]


@on_cpu
@pytest.mark.parametrize("at", range(len(CASES)), ids=lambda at: CASES[at].name)
def test_gradients_from_signs(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = _spy(monkeypatch)
    # A block has 64 queries and 64 keys; tiles of one and two blocks in either kernel.
    keys, queries = ((64, 128), (128, 64), (64, 64))[at % 3]
    small: dict[tuning.Kernel, Tile] = {
        "forward": Tile(16, 32, 4, 1),
        "dkv": Tile(keys, (64, 128)[at % 2], 4, 1, one_loop=at % 4 == 3, prescale=at % 2 == 0),
        "dq": Tile(queries, (128, 64)[at // 2 % 2], 4, 1, one_loop=at % 4 == 3),
    }
    case = CASES[at]
    # Signs of all heads at once, of one batch, and of one key head.
    for fit in (case.batch * case.heads, case.heads, case.heads // (case.kv_heads or case.heads)):
        limit = fit * 256 * (256 if case.keys > 128 else 128) // 8
        with tuning.override(small, tma=at % 2 > 0, sign_bytes=limit):
            parts.clear()
            check(op.attend, arguments(case, torch.float32, "cpu"), 2e-6, 5e-6)
        assert parts == [fit] * (case.batch * case.heads // fit)


@on_cpu
def test_parts_of_other_tensors_have_other_launches() -> None:
    """Two heads at a time, of four and of eight: the outputs have other strides, the inputs not."""
    small: dict[tuning.Kernel, Tile] = {"dkv": Tile(64, 64, 4, 1), "dq": Tile(64, 64, 4, 1)}
    for heads in (4, 8):
        made = arguments(replace(ODD, heads=heads, kv_heads=heads), torch.float32, "cpu")
        # The inputs are slices of tensors with ten heads, so their strides are the same.
        wide = {name: _in_ten_heads(made.leaves[name]) for name in "qkv"}
        made.leaves |= {name: each.requires_grad_() for name, each in wide.items()}
        made.cotangents[0] = _in_ten_heads(made.cotangents[0])
        with tuning.override(small, sign_bytes=2 * 256 * 128 // 8):
            check(op.attend, made, 2e-6, 5e-6)


def _in_ten_heads(given: Tensor) -> Tensor:
    """The same values [B, H, T, D] as the first heads of a tensor [B, T, 10, D]."""
    batch, heads, rows, width = given.shape
    room = torch.zeros(batch, rows, 10, width)
    room[:, :, :heads] = given.detach().transpose(1, 2)
    return room[:, :, :heads].transpose(1, 2)


def _spy(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of query heads that later backward passes store signs of at a time."""
    parts: list[int] = []
    original = run_backward._run

    def spy(problem: Problem, grads: Any, results: Any, signs: Tensor | None, *rest: Any) -> None:
        parts.append(0 if signs is None else problem.q.shape[0] * problem.q.shape[1])
        if signs is not None:
            # Bits for whole tiles of a head, and for reads ahead of the last block.
            head_bits = 256 * (256 if problem.settings.max_k > 128 else 128)
            assert (signs.numel() * 16 - 8 * 64 * 64) // head_bits >= parts[-1]
        original(problem, grads, results, signs, *rest)

    monkeypatch.setattr(run_backward, "_run", spy)
    return parts


def _heads(
    n: int, heads: int = 8, kv_heads: int = 8, width: int = 64, level: int = 0, **changes: Any
) -> int:
    """Number of heads whose signs are stored at a time, for a call on n tokens."""
    q = torch.empty(4, heads, n, width, dtype=torch.bfloat16, device="meta")
    k = torch.empty(4, kv_heads, n, width, dtype=torch.bfloat16, device="meta")
    problem = with_changes(Problem(q, k, k, NO_INPUTS, Settings(0.125, n, n)), changes)
    return backward_choice.choose(problem, level, q).sign_heads


def test_when_signs_are_stored() -> None:
    mask = torch.ones(1, dtype=torch.bool)
    assert _heads(1024) == 32
    nowhere: list[dict[str, Any]] = [{"power": 2}, {"dropout_p": 0.1}, {"mask": mask}, {"level": 2}]
    assert [_heads(1024, **changes) for changes in nowhere] == [0] * 4
    assert _heads(1023) == _heads(1024, width=256) == 0, "not known to pay"
    # 256 MiB are 2^31 bits.
    assert _heads(4096, heads=32) == 128
    assert _heads(16_384, heads=32) == 8
    assert _heads(16_385, heads=32) == 7, "whole tiles"
    assert _heads(46_000, kv_heads=8) == 1
    assert _heads(46_000, kv_heads=4) == 0, "two heads that share keys do not fit"
    with tuning.override({"dq": Tile(32, 64, 4, 1)}):
        assert _heads(4096) == 0, "part of a block"
    with tuning.override({"dkv": Tile(64, 256, 8, 1)}):
        assert _heads(4096) == 0, "more than a line of blocks is padded to"
    with tuning.override(sign_bytes=0):
        assert _heads(4096) == 0


@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_parts_cover_every_head_once(batches: int, heads: int, data: st.DataObject) -> None:
    fit = data.draw(st.integers(1, batches * heads))
    seen = torch.zeros(batches, heads)
    for part in run_backward._parts(batches, heads, fit):
        own = seen[part]
        assert own.numel() <= fit
        assert own.is_contiguous()
        own += 1
    assert bool((seen == 1).all())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("at", range(len(CASES)), ids=lambda at: CASES[at].name)
def test_gradients_from_signs_on_the_device(at: int, width: int, dtype: torch.dtype) -> None:
    case = replace(CASES[at], width=width, value_width=width)
    # The table's tiles for long calls, on lengths that none of them divides.
    case = replace(case, queries=16 * case.queries - 5, keys=16 * case.keys - 3)
    if case.key_lengths is not None:
        case = replace(case, key_lengths=tuple(16 * length for length in case.key_lengths))
    made = arguments(case, dtype, "cuda")
    for heads in (case.batch * case.heads, 2):
        with tuning.override(sign_bytes=heads * 3072 * 3072 // 8):
            check(op.attend, made, *LOOSE[dtype])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_signs_only_change_the_rounding_of_dq() -> None:
    made = arguments(
        replace(ODD, queries=2000, keys=2000, width=64, causal=True), torch.bfloat16, "cuda"
    )
    grads = []
    for sign_bytes in (1 << 30, 0):
        with tuning.override(sign_bytes=sign_bytes):
            grads.append(found(op.attend, made)[1])
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in ("k", "v"))
    torch.testing.assert_close(grads[0]["q"], grads[1]["q"], rtol=0.02, atol=0.02)
