"""Tests of the Hopper forward kernel against the formula: in the emulator, and on a GPU."""

import itertools
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reluformer import relu_attention
from reluformer.ops import signature, stats
from reluformer.ops.backends.triton import launch, op, run_packed, tuning
from reluformer.ops.backends.triton.hopper import launch_forward
from reluformer.ops.backends.triton.hopper.arguments import ForwardConfig, ForwardPointers, Scalars
from reluformer.ops.backends.triton.hopper.launch_forward import ForwardTile, HopperLaunch
from reluformer.ops.call import Call, Packing
from reluformer.ops.rule import Rectified
from reluformer.ops.visibility import Visibility
from tests.ops.backends.triton import gluon_emulator
from tests.ops.rectified import Case, arguments
from tests.ops.rectified import check as check_gradients

FILE = Path(__file__).parents[5] / "reluformer/ops/backends/triton/hopper/forward.py"
SOURCE = gluon_emulator.kernels(FILE)
WIDTH, BATCH = 16, 2
TWO = ForwardTile(2, 32, 16, 2, q_in_registers=False)
# Tiles of 48 rows: they divide neither the blocks of rows nor the lengths of most tests.
THREE = ForwardTile(3, 16, 32, 2, q_in_registers=False, converts_late=True)
TWO_TILES = (TWO, TWO._replace(q_in_registers=True))
# Two consumers that convert late, with and without queries in registers.
LATE = (TWO._replace(converts_late=True), ForwardTile(2, 16, 32, 2, True, converts_late=True))
by_consumers = pytest.mark.parametrize("tiles", [TWO_TILES, (*LATE, THREE)], ids=["two", "late"])


def config(tile: ForwardTile, **options: Any) -> ForwardConfig:
    """A configuration of the kernel; a plain full call unless options differ."""
    plain = ForwardConfig(
        D=WIDTH, GROUP=1, CONSUMERS=tile.consumers, ROWS=tile.rows, KEYS=tile.keys,
        STAGES=tile.stages, Q_IN_REGISTERS=tile.q_in_registers, CONVERT_LATE=tile.converts_late,
        CAUSAL=False, POWER=1, HAS_THRESHOLD=False, SCALE_SCORES=False, MASK_TAIL=False,
        ROW_SUMS=False, ROW_NORMALISE=False, ENTROPY_EVERY=1,
    )  # fmt: skip
    return plain._replace(**options)


def run(
    queries: int,
    keys: int,
    programs: int,
    *,
    causal: bool,
    power: int,
    threshold: float | None,
    lengths: tuple[int, ...] | None,
    group: int,
    sums: bool,
    row_normalise: bool,
    tile: ForwardTile,
    seed: int,
    every: int = 0,
    source: dict[str, Any] = SOURCE,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, Any]:
    """(output, row sums, sums of w log w of one block in `every`, the reference's results)."""
    torch.manual_seed(seed)
    heads = 2 * group
    q = torch.randn(BATCH, heads, queries, WIDTH).bfloat16()
    k, v = (torch.randn(BATCH, heads // group, keys, WIDTH).bfloat16() for _ in range(2))
    if lengths is not None:
        for b, length in enumerate(lengths):
            k[b, :, length:] = v[b, :, length:] = float("nan")
    out = torch.full_like(q, float("nan"))
    row_sum = torch.full((BATCH, heads, queries), float("nan")) if sums else None
    log_sum = torch.full_like(row_sum, float("nan")) if row_sum is not None and every else None
    gamma = torch.tensor([0.5 + 0.25 * h for h in range(heads)])
    thresholds = None if threshold is None else torch.full((heads,), threshold)
    key_lengths = None if lengths is None else torch.tensor(lengths)
    tiles = math.ceil(queries / tile.all_rows)
    items = BATCH * heads * (math.ceil(tiles / 2) if causal else tiles)
    scale = WIDTH**-0.5
    epsilon = 1e-3 if row_normalise else None
    gluon_emulator.launch(
        source["hopper_forward_kernel"],
        min(programs, items),
        *descriptors(tile, q, k, v, out),
        pointers(None, row_sum, log_sum, gamma, thresholds, key_lengths, None),
        *(items, heads, tiles, queries, keys),
        (0, 0),
        Scalars(scale, 1.0 if power > 2 else scale**power, 0.0, 0.5, epsilon),
        seed=seed,
        CONFIG=config(
            tile, GROUP=group, CAUSAL=causal, POWER=power,
            HAS_THRESHOLD=threshold is not None, SCALE_SCORES=power > 2,
            MASK_TAIL=(threshold is not None and keys % tile.keys > 0) or lengths is not None,
            ROW_SUMS=sums,
            ROW_NORMALISE=row_normalise, ENTROPY_EVERY=max(every, 1),
        ),
    )  # fmt: skip
    expected = relu_attention(
        *(x.nan_to_num().double() for x in (q, k, v)), scale=scale, causal=causal, power=power,
        gamma=gamma.double(), threshold=threshold or 0.0, row_normalise=epsilon,
        key_lengths=key_lengths, return_sums="entropy", impl="reference",
    )  # fmt: skip
    return out, row_sum, log_sum, expected


def descriptors(tile: ForwardTile, *tensors: torch.Tensor) -> list[gluon_emulator.Descriptor]:
    """The TMA descriptors of q, k, v and the output."""
    rows = (tile.rows, tile.keys, tile.keys, tile.rows)
    return list(map(gluon_emulator.Descriptor, tensors, rows))


def pointers(*tensors: torch.Tensor | None) -> Any:
    return ForwardPointers(*(x if x is None else gluon_emulator.Pointer(x) for x in tensors))  # type: ignore[arg-type]


def check(*args: int, **options: Any) -> None:
    out, row_sum, log_sum, expected = run(*args, **options)
    error = (out.double() - expected.output).norm() / expected.output.norm().clamp_min(1e-9)
    assert error < 6e-3, f"relative error of the output: {error:.1e}"
    if row_sum is not None:
        exact = expected.sums.row_sum
        assert (row_sum.double() - exact).norm() / exact.norm().clamp_min(1e-9) < 6e-3
    if row_sum is not None and log_sum is not None:
        sampled = stats.sampled_rows(*log_sum.shape, options["every"], log_sum.device)
        entropy = stats.entropy_from_sums(row_sum.double(), log_sum.double())[sampled]
        exact = expected.sums.entropy[sampled]
        assert (entropy - exact).norm() <= 1e-2 * exact.norm() + 1e-3
        assert log_sum[~sampled].eq(0).all()


@by_consumers
@settings(max_examples=25, deadline=None)
@given(
    queries=st.integers(1, 150),
    keys=st.integers(1, 100),
    programs=st.integers(1, 5),
    causal=st.booleans(),
    power=st.sampled_from((1, 2, 4, 8)),
    threshold=st.sampled_from((None, -0.5, 0.25)),
    padded=st.booleans(),
    group=st.sampled_from((1, 2)),
    sums=st.sampled_from(("none", "sums", "row_normalise")),
    every=st.sampled_from((0, 1, 2)),
    seed=st.integers(0, 1000),
)
def test_kernel_in_emulator_matches_reference(
    queries: int, keys: int, programs: int, causal: bool, power: int, threshold: float | None,
    padded: bool, group: int, sums: str, every: int, seed: int, tiles: tuple[ForwardTile, ...],
) -> None:  # fmt: skip
    lengths = (keys * 2 // 3, seed % (keys + 1)) if padded else None
    check(
        queries, keys, programs, causal=causal, power=power, threshold=threshold, lengths=lengths,
        group=group, sums=sums != "none", row_normalise=sums == "row_normalise",
        tile=tiles[seed % len(tiles)], seed=seed, every=0 if THREE in tiles else every,
    )  # fmt: skip


@by_consumers
@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 60)), min_size=1, max_size=4),
    programs=st.integers(1, 5),
    causal=st.booleans(),
)
def test_packed_sequences_in_emulator_match_reference(
    lengths: list[tuple[int, int]], programs: int, causal: bool, tiles: tuple[ForwardTile, ...]
) -> None:
    tile = tiles[programs % len(tiles)]
    heads, scale = 2, WIDTH**-0.5
    ends_q, ends_k = ([0, *itertools.accumulate(side)] for side in zip(*lengths, strict=True))
    # Two more rows than the sequences have: they must be neither read nor written.
    q = torch.randn(1, heads, ends_q[-1] + 2, WIDTH).bfloat16()
    k, v = (torch.randn(1, heads, ends_k[-1] + 2, WIDTH).bfloat16() for _ in range(2))
    k[:, :, -2:] = v[:, :, -2:] = float("nan")
    out = torch.full_like(q, 7.0)
    row_sum = torch.full((q.shape[2], heads), 7.0)
    longest = max(1, *(each for each, _ in lengths))
    rows = tile.all_rows
    room = run_packed.work_list_size(q.shape[2], len(lengths), longest, rows, paired=causal)
    cu = (torch.tensor(each) for each in (ends_q, ends_k))
    work = run_packed.work_list(*cu, room, rows, paired=causal)
    gluon_emulator.launch(
        SOURCE["hopper_forward_kernel"],
        programs,
        *descriptors(tile, q, k, v, out),
        pointers(out, row_sum, None, None, None, None, work),
        *(None, heads, None, None, None),
        out.stride()[1:3],
        Scalars(scale, scale, 0.0, 0.5, None),
        CONFIG=config(
            tile,
            CAUSAL=causal,
            MASK_TAIL=True,
            ROW_SUMS=True,
        ),  # fmt: skip
    )
    for (q0, q1), (k0, k1) in zip(pairwise(ends_q), pairwise(ends_k), strict=True):
        expected = relu_attention(
            q[:, :, q0:q1].double(), k[:, :, k0:k1].double(), v[:, :, k0:k1].double(),
            causal=causal, return_sums="row_sum", impl="reference",
        )  # fmt: skip
        error = (out[:, :, q0:q1].double() - expected.output).norm()
        assert error <= 6e-3 * expected.output.norm() + 1e-6
        sums = row_sum[q0:q1].T.double()
        assert (sums - expected.sums.row_sum[0]).norm() <= 6e-3 * sums.norm() + 1e-6
    assert (out[:, :, -2:] == 7).all() and (row_sum[-2:] == 7).all()


def test_key_lengths_are_clamped_in_64_bits() -> None:
    key_end = gluon_emulator.kernels(FILE.with_name("device.py"))["key_end"]
    lengths = gluon_emulator.Pointer(torch.tensor([2**40, -(2**40), 7]))
    assert [int(key_end(lengths, at, 9)) for at in range(3)] == [9, 0, 7]


class Mistake(NamedTuple):
    """A text of the kernel, its wrong replacement, and the error that the emulator must report."""

    right: str
    wrong: str
    error: str


WRONG_OUTPUT, DEADLOCK = "relative error of the output", "deadlock"
RELEASE_V = "mbarrier.arrive(shared.v_empty.index(v_ring.stage), count=1)"
# On a GPU most runs with such a mistake would still give the right result.
MISTAKES = {
    "values released before they are read": Mistake(
        f"        acc = warpgroup_mma_wait(0, [acc])\n        {RELEASE_V}",
        f"        {RELEASE_V}\n        acc = warpgroup_mma_wait(0, [acc])",
        WRONG_OUTPUT,
    ),
    "producer waits for empty buffers to be read": Mistake(
        "    k_ring = Ring(0, 1)\n", "    k_ring = Ring(0, 0)\n", DEADLOCK
    ),
    "unread tiles are not released": Mistake(
        "for _ in range(low, high):", "for _ in range(low, low):", DEADLOCK
    ),
    "values of padding are read": Mistake(
        "            v_tile = zero_padding(", "            zero_padding(", WRONG_OUTPUT
    ),
    "an output is overwritten before it is stored": Mistake(
        "    tma.store_wait(0)\n    thread_barrier()\n    whole",
        "    thread_barrier()\n    whole",
        WRONG_OUTPUT,
    ),
    "queries released before they are in registers": Mistake(
        "    fence_async_shared()\n    thread_barrier()\n    mbarrier.arrive(empty",
        "    thread_barrier()\n    mbarrier.arrive(empty",
        WRONG_OUTPUT,
    ),
}


@pytest.mark.parametrize(
    ("name", "tile"),
    [(name, TWO_TILES["registers" in name]) for name in MISTAKES]
    + [(name, THREE) for name in MISTAKES if "registers" not in name],
    ids=lambda each: f"{each.consumers} consumers" if isinstance(each, ForwardTile) else each,
)
def test_emulator_finds_mistake(
    name: str, tile: ForwardTile, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, wrong, error = MISTAKES[name]
    broken = gluon_emulator.kernels(FILE, (right, wrong))
    lengths = (90, 61) if "padding" in name else None
    in_registers = tile.q_in_registers
    options: dict[str, Any] = {
        "causal": not in_registers, "power": 1, "threshold": None, "lengths": lengths, "group": 1,
        "sums": False, "row_normalise": False, "tile": tile,
    }  # fmt: skip
    # With few keys the producer loads the next queries at once.
    sizes = (300, 10, 1) if in_registers else (100, 100, 2)
    monkeypatch.setattr(gluon_emulator, "PAUSES", (0.0, 0.004))
    # Control: the kernel without the mistake passes under the same settings.
    check(*sizes, **options, seed=3)
    with pytest.raises(AssertionError, match=error):  # noqa: PT012 (the delays are random)
        for seed in range(20):
            check(*sizes, **options, seed=seed, source=broken)


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
by_tile = pytest.mark.parametrize(("width", "tile"), launch_forward.TILES)
MODEL = {"power": 8, "threshold": (-8.0, -4.0), "row_normalise": 1e-4, "statistics": 1}
CASES = [
    Case("full", statistics=1),
    Case("causal", causal=True, gamma=True),
    Case("groups", heads=4, kv_heads=2, causal=True, gamma=True, threshold=0.3, statistics=1),
    Case("padding", batch=3, key_lengths=(0, 45, 10**6)),
    Case("squared", power=2, causal=True, threshold=(0.4, -0.3)),
    Case("model", **MODEL),
    Case("entropies", statistics=2, causal=True, gamma=True),
    Case("causal model with padding", batch=2, causal=True, key_lengths=(10**6, 70), **MODEL),
]


# One, two and three key tiles, partial tiles, more queries than keys.
LENGTHS = ((1, 1), (64, 64), (130, 65), (257, 129), (70, 700), (700, 130), (1024, 1024))


@pytest.mark.gpu
@on_gpu
@by_tile
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_on_gpu_matches_reference(case: Case, width: int, tile: str) -> None:
    launch.LAUNCHES.clear()
    for queries, keys in LENGTHS:
        if queries == 1 and case.gamma:
            # The gradient of gamma sums one row; if the terms cancel, only rounding is left.
            continue
        lengths = case.key_lengths and tuple(min(each, keys) for each in case.key_lengths)
        odd = replace(
            case, queries=queries, keys=keys, width=width, value_width=width, key_lengths=lengths
        )
        for transposed in (True, False):
            given = arguments(odd, torch.bfloat16, "cuda", transposed=transposed)
            with tuning.override(hopper=True, forward_tile=tile):
                check_gradients(op.attend, given, 9e-3, 18e-3)
    assert any(isinstance(each, HopperLaunch) for each in launch.LAUNCHES.values())


@pytest.mark.gpu
@on_gpu
@by_tile
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("power", [1, 4])
def test_many_tiles_per_program_match_portable_kernel(
    width: int, tile: str, causal: bool, power: int
) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(16, 1111, 16, width, device="cuda").bfloat16() for _ in range(3))
    options = {"causal": causal, "power": power, "impl": "triton", "return_sums": "row_sum"}
    launch.LAUNCHES.clear()
    results = []
    for hopper in (None, None, False):
        with tuning.override(hopper=hopper, forward_tile=tile):
            made = relu_attention(*(each.transpose(1, 2) for each in (q, k, v)), **options)
            results.append((made.output, made.sums.row_sum))
    # The default choice of the kernel at this size.
    assert any(isinstance(each, HopperLaunch) for each in launch.LAUNCHES.values())
    assert all(torch.equal(*pair) for pair in zip(results[0], results[1], strict=True))
    for result, portable in zip(results[0], results[2], strict=True):
        assert (result.float() - portable.float()).norm() <= 2e-3 * portable.float().norm()


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(
    "options", [{}, {"row_normalise": 1e-4, "power": 8, "threshold": -4.0}], ids=str
)
@by_tile
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_on_gpu_match_reference(
    width: int, tile: str, causal: bool, options: dict[str, Any]
) -> None:
    """Empty sequences, more queries than keys, partial tiles, and rows of no sequence."""
    torch.manual_seed(0)
    lengths = [(700, 700), (0, 5), (1, 300), (130, 64), (64, 65), (9, 0), (513, 1024), (256, 256)]
    ends = [torch.tensor([0, *itertools.accumulate(side)]) for side in zip(*lengths, strict=True)]
    q = torch.randn(int(ends[0][-1]) + 40, 4, width).bfloat16()
    k, v = (torch.randn(int(ends[1][-1]) + 40, 2, width).bfloat16() for _ in range(2))
    k[-40:] = v[-40:] = float("nan")
    launch.LAUNCHES.clear()
    with tuning.override(hopper=True, forward_tile=tile):
        call = Call(
            *(each.cuda() for each in (q, k, v)), Visibility(causal=causal), width**-0.5,
            return_sums="row_sum",
            packing=Packing(*(each.int().cuda() for each in ends), 700, 1024),
        )  # fmt: skip
        out, row_sum, _ = op.attend(call, Rectified(**options))
    assert any(isinstance(each, HopperLaunch) for each in launch.LAUNCHES.values())
    for (q0, q1), (k0, k1) in zip(*(pairwise(each.tolist()) for each in ends), strict=True):
        tensors = (q[q0:q1], k[k0:k1], v[k0:k1])
        expected = relu_attention(
            *(each.double().transpose(0, 1)[None] for each in tensors), causal=causal,
            return_sums="row_sum", impl="reference", **options,
        )  # fmt: skip
        pairs = ((out, expected.output[0].transpose(0, 1)), (row_sum, expected.sums.row_sum[0].T))
        for result, exact in pairs:
            error = (result[q0:q1].double().cpu() - exact).norm()
            assert error <= 9e-3 * exact.norm() + 1e-6, (q1 - q0, k1 - k0)
    assert out[-40:].eq(0).all()


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_sampled_entropies_match_portable_kernel(width: int, causal: bool) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 3, 5, 1111, width, device="cuda").bfloat16().unbind()
    results = []
    for hopper in (True, True, False):
        with tuning.override(hopper=hopper):
            results.append(
                op.attend(
                    Call(
                        q, k, v, Visibility(causal=causal), width**-0.5,
                        return_sums="entropy", entropy_every=4,
                    ),
                    Rectified(),
                )
            )  # fmt: skip
    assert all(torch.equal(*pair) for pair in zip(results[0], results[1], strict=True))
    for result, portable in zip(results[0], results[2], strict=True):
        assert torch.equal(result == 0, portable == 0)
        assert (result.float() - portable.float()).norm() <= 4e-3 * portable.float().norm()


@pytest.mark.gpu
@on_gpu
def test_first_call_can_be_captured_in_cuda_graph() -> None:
    q, k, v = (torch.randn(8, 32, 700, 64, device="cuda").bfloat16() for _ in range(3))
    launch.LAUNCHES.clear()
    eager = relu_attention(q, k, v, causal=True, impl="triton")
    launch.LAUNCHES.clear()
    signature.CHOICES.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = relu_attention(q, k, v, causal=True, impl="triton")
    graph.replay()
    assert torch.equal(captured, eager)
