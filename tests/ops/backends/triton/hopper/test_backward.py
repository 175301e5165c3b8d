"""Tests of the Hopper backward kernels against the formula: in the emulator, and on a GPU."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reluformer import relu_attention
from reluformer.ops.backends.triton import op, run_backward, tuning
from reluformer.ops.backends.triton.hopper.arguments import (
    BackwardConfig,
    BackwardPointers,
    Scalars,
)
from reluformer.ops.backends.triton.hopper.launch_forward import HopperLaunch
from tests.ops.backends.triton import gluon_emulator
from tests.ops.rectified import Case, arguments
from tests.ops.rectified import check as check_gradients

FOLDER = Path(__file__).parents[5] / "reluformer/ops/backends/triton/hopper"
FILES = tuple(FOLDER / f"backward_{name}.py" for name in ("dkv", "dq", "dq_product"))
SOURCES = tuple(gluon_emulator.kernels(file) for file in FILES)
SIDE, WIDTH, BATCH = 64, 16, 2
# The fewest: one tile can be held while another is released unread.
STAGES = 3


def gradients(
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
    signs: bool,
    in_registers: bool,
    seed: int,
    separate: bool = False,
    stored_rows: int = 0,
    compact: bool = False,
    cols: int = SIDE,
    consumers: int = 2,
    sources: tuple[dict[str, Any], ...] = SOURCES,
) -> tuple[list[Tensor], list[Tensor], float]:
    """(gradients of the kernels, of the reference, norm of the rows of the last one).

    The gradients are those of q, k, v and, if there is one, of the threshold. The latter is a sum
    over all rows, whose terms can cancel. With `stored_rows`, score gradients are stored, and a
    consumer of the kernel for dQ owns that number of rows; with `compact`, blocks that no row sees
    have no memory. Streamed tiles have `cols` rows, and the kernel for dQ that number of consumers.
    """
    torch.manual_seed(seed)
    heads = group if group > 1 else 2
    kv_heads = heads // group
    q, grad = (torch.randn(BATCH, heads, queries, WIDTH).bfloat16() for _ in range(2))
    k, v = (torch.randn(BATCH, kv_heads, keys, WIDTH).bfloat16() for _ in range(2))
    grad_sum = torch.randn(BATCH, heads, queries) if sums else None
    gamma = torch.tensor([0.5 + 0.25 * h for h in range(heads)])
    scale = WIDTH**-0.5
    thresholds = None if threshold is None else torch.full((heads,), threshold)
    # The host multiplies dO and the row terms by the row factors, if these differ.
    per_row = causal or group > 1
    unit = 1.0 if power > 2 else scale**power
    factor = torch.ones(BATCH, heads, queries)
    if per_row:
        n = torch.tensor(lengths or [keys] * BATCH)[:, None].expand(BATCH, queries)
        if causal:
            position = torch.arange(queries) + keys - queries + 1
            n = torch.minimum(n, position.clamp(min=0))
        factor = unit / gamma[:, None] * (n.clamp(min=1) / 2)[:, None] ** -0.5 * (n > 0)[:, None]
    grad = (grad * factor[..., None]).bfloat16()
    # The reference gets the rounded dO: where terms cancel, its rounding would dominate.
    rounded = torch.where(factor > 0, 1 / factor.double(), 0.0)[..., None] * grad
    expected = _expected(
        [q, k, v], thresholds, rounded, grad_sum, scale=scale, causal=causal, power=power,
        gamma=gamma.double(), key_lengths=None if lengths is None else torch.tensor(lengths),
    )  # fmt: skip
    for b, length in enumerate(lengths or ()):
        k[b, :, length:] = v[b, :, length:] = float("nan")
    padded = 256 * math.ceil(queries / 256)
    terms = torch.full((BATCH, heads, padded), 0.0)
    if grad_sum is not None:
        terms[..., :queries] = grad_sum * factor
        if cols == SIDE:
            # The pass over output gradients writes tiles of 64 rows; the pass over rows, all rows.
            terms[..., SIDE * math.ceil(queries / SIDE) :] = float("nan")
    key_blocks = 2 * math.ceil(keys / 128)
    head_blocks = padded // SIDE * key_blocks
    if compact:
        # Query block i sees key block j if its last row sees the first key.
        first = math.ceil(max(keys - queries, 0) / SIDE)
        counts = [padded // SIDE - max(j - first, 0) for j in range(math.ceil(keys / SIDE))]
        head_blocks = sum(counts)
    # Sign words that the kernel does not write have all bits set.
    bits = torch.full((256 * (BATCH * heads * head_blocks + 8),), -1, dtype=torch.int16)
    # Score gradients that the kernel does not write are NaN.
    score_gradients = torch.full(
        (1, 1, BATCH * heads * head_blocks * SIDE, SIDE), float("nan"), dtype=torch.bfloat16
    )
    stored = score_gradients.view(torch.int32) if stored_rows else bits
    results = [torch.full_like(x, float("nan")) for x in (q, k, v)]
    row_shift = torch.full((BATCH, heads, queries), float("nan"))
    describe = gluon_emulator.Descriptor
    config = BackwardConfig(
        D=WIDTH, GROUP=group, CONSUMERS=2, ROWS=SIDE, COLS=cols, STAGES=STAGES,
        IN_REGISTERS=in_registers,
        CAUSAL=causal, POWER=power, HAS_THRESHOLD=threshold is not None, SCALE_SCORES=power > 2,
        ROW_TERMS=sums, GRAD_SCALED=per_row, RAGGED=keys % cols > 0, SIGNS=signs,
        GRADIENTS=stored_rows > 0, COMPACT=compact, SEPARATE_SCORES=separate,
    )  # fmt: skip
    of_keys = [(q, cols), (k, SIDE), (v, SIDE), (grad, cols)]
    of_queries = [(q, SIDE), (k, cols), (v, cols), (grad, SIDE)]
    launches = [
        (0, "hopper_dkv_kernel", [*of_keys, (results[1], SIDE), (results[2], SIDE)]),
        (1, "hopper_dq_kernel", [*of_queries, (results[0], SIDE)]),
    ]
    if stored_rows:
        tiled = [(score_gradients, stored_rows), (k, SIDE), (results[0], stored_rows)]
        launches[1] = (2, "hopper_dq_product_kernel", tiled)
    for at, name, tiled in launches:
        resident_heads, length = (heads, queries) if at else (kv_heads, keys)
        rows = stored_rows if at == 2 else SIDE
        parts = consumers if at == 1 else 2
        tiles = math.ceil(length / (parts * rows))
        items = BATCH * resident_heads * (math.ceil(tiles / 2) if causal else tiles)
        sizes = (items, resident_heads, tiles, queries, keys, key_blocks, head_blocks, padded)
        tensors = (
            row_shift if at and thresholds is not None else None,
            (stored.view(torch.int32) if at else stored) if signs or stored_rows else None,
            terms if sums else None,
            gamma,
            thresholds,
            None if lengths is None else torch.tensor(lengths),
        )
        pointers = (None if x is None else gluon_emulator.Pointer(x) for x in tensors)
        gluon_emulator.launch(
            sources[at][name],
            min(programs, items),
            *(describe(*each) for each in tiled),
            BackwardPointers(*pointers),  # type: ignore[arg-type]
            *map(torch.tensor, sizes),
            Scalars(scale, unit, 0.0, 0.5, None),
            seed=seed,
            CONFIG=config._replace(ROWS=rows, CONSUMERS=parts),
        )
    if thresholds is not None:
        results.append(-row_shift.sum((0, 2)))
    return results, expected, float(row_shift.norm())


def _expected(
    tensors: list[Tensor],
    thresholds: Tensor | None,
    grad: Tensor,
    grad_sum: Tensor | None,
    **options: Any,
) -> list[Tensor]:
    """Gradients of the reference for q, k, v and the thresholds."""
    leaves = [x.double().requires_grad_() for x in tensors]
    if thresholds is not None:
        leaves.append(thresholds.double().requires_grad_())
        options["threshold"] = leaves[-1]
    result = relu_attention(*leaves[:3], **options, return_sums="row_sum", impl="reference")
    total = (result.output * grad.double()).sum()
    if grad_sum is not None:
        total = total + (result.sums.row_sum * grad_sum.double()).sum()
    return list(torch.autograd.grad(total, leaves))


def check(*args: int, **options: Any) -> None:
    results, expected, size = gradients(*args, **options)
    names = ("dq", "dk", "dv", "threshold")
    for name, result, exact in zip(names, results, expected, strict=False):
        least = max(size, 1e-6) if name == "threshold" else 1e-6
        error = (result.double() - exact).norm() / exact.norm().clamp_min(least)
        assert error < 12e-3, f"relative error of {name}: {error:.2e}"


@settings(max_examples=24, deadline=None)
@given(
    queries=st.integers(1, 300),
    keys=st.integers(1, 300),
    programs=st.integers(1, 4),
    causal=st.booleans(),
    power=st.sampled_from((1, 2, 4, 8)),
    threshold=st.sampled_from((None, -0.5, 0.25)),
    padded=st.booleans(),
    group=st.sampled_from((1, 2)),
    sums=st.booleans(),
    signs=st.booleans(),
    in_registers=st.booleans(),
    seed=st.integers(0, 1000),
    separate=st.booleans(),
    stored_rows=st.sampled_from((0, 64, 128)),
    compact=st.booleans(),
    is_wide=st.booleans(),
    consumers=st.sampled_from((2, 3)),
)
def test_kernels_in_emulator_match_reference(
    queries: int, keys: int, programs: int, causal: bool, power: int, threshold: float | None,
    padded: bool, group: int, sums: bool, signs: bool, in_registers: bool, seed: int,
    separate: bool, stored_rows: int, compact: bool, is_wide: bool, consumers: int,
) -> None:  # fmt: skip
    lengths = (keys * 2 // 3, seed % (keys + 1)) if padded else None
    signs = signs and power == 1 and not stored_rows
    is_wide = is_wide and not signs and not stored_rows
    check(
        queries, keys, programs, causal=causal, power=power, threshold=threshold, lengths=lengths,
        group=group, sums=sums, signs=signs, in_registers=in_registers, seed=seed,
        separate=separate and power > 1, stored_rows=stored_rows,
        compact=compact and causal and stored_rows > 0, cols=128 if is_wide else SIDE,
        consumers=2 if signs else consumers,
    )  # fmt: skip


class Mistake(NamedTuple):
    """A text of a kernel, its wrong replacement, and the error that the emulator must report."""

    file: int
    """Index in FILES."""
    right: str
    wrong: str
    error: str


DEADLOCK = "deadlock"
ARRIVE = "        mbarrier.arrive(shared.empty.index(held), count=1)\n"
WAIT_DV = "        dv = warpgroup_mma_wait(0, [dv])\n"
WAIT_DK = (
    "        dp, dk = warpgroup_mma_wait(1, [dp, dk])\n"
    "        ds = score_gradients(add_row_terms(dp, row_terms, CONFIG), relu_pow_minus_1, "
    "CONFIG.POWER)\n"
    "        if CONFIG.ROW_TERMS:\n"
    "            terms += CONFIG.COLS\n"
    "        if CONFIG.GRADIENTS:\n"
    "            # Before the wait for dV, so that the stores leave beside it.\n"
    "            store_gradients(ds, blocks, key_tile.key < key_tile.end)\n"
    "            blocks += PAIRS\n"
    "        end_block(ring.stage)\n"
)
WAIT_SEPARATE = "        dp, dk = warpgroup_mma_wait(0, [dp, dk])\n"
WAIT_POWER = "        dp, acc = warpgroup_mma_wait(0, [dp, acc])\n"
WAIT_DQ = "        acc = warpgroup_mma_wait(0, [acc])\n"
ARRIVE_PRODUCT = "        mbarrier.arrive(shared.empty.index(ring.stage), count=1)\n"
RELEASE_LOADED = "    thread_barrier()\n    mbarrier.arrive(empty"
STORE = "    thread_barrier()\n    whole"
# On a GPU most runs with such a mistake would still give the right result.
MISTAKES = {
    "queries released before they are read": Mistake(
        0, WAIT_DK + WAIT_DV + ARRIVE, ARRIVE + WAIT_DK + WAIT_DV, "relative error of dk"
    ),
    "keys released before they are read": Mistake(
        1, WAIT_DQ + ARRIVE, ARRIVE + WAIT_DQ, "relative error of dq"
    ),
    "queries of a power are released before they are read": Mistake(
        0, WAIT_SEPARATE + ARRIVE, ARRIVE + WAIT_SEPARATE, "relative error of d[kv]"
    ),
    "keys of a power are released before they are read": Mistake(
        1, WAIT_POWER + ARRIVE, ARRIVE + WAIT_POWER, "relative error of dq"
    ),
    "producer waits for empty buffers to be read": Mistake(
        0, "    ring = Ring(0, 1)\n", "    ring = Ring(0, 0)\n", DEADLOCK
    ),
    "unread tiles are not released": Mistake(
        1, "ring, loaded - count, CONFIG", "ring, loaded * 0, CONFIG",
        DEADLOCK,
    ),
    "tiles of a group are read by the wrong head": Mistake(
        0, "unread = gl.where(member > 0, low - first, 0)", "unread = gl.where(member > 0, 0, 0)",
        DEADLOCK,
    ),
    "keys of padding are read": Mistake(
        1, "            k_tile = zero_padding(", "            zero_padding(", "relative error of dq"
    ),
    "a gradient is overwritten before it is stored": Mistake(
        0, f"    tma.store_wait(0)\n{STORE}", STORE, "relative error of d[kv]"
    ),
    "stored gradients and their keys are released before they are read": Mistake(
        2, WAIT_DQ + ARRIVE_PRODUCT, ARRIVE_PRODUCT + WAIT_DQ, "relative error of dq"
    ),
    "stored gradients of keys that no row sees are read": Mistake(
        2, "if MASKED:\n", "if MASKED and PADDED:\n", "relative error of dq"
    ),
    "memory of compact stored gradients is read as if it were full": Mistake(
        2, "                place -= missing_blocks(j + 1, sizes) * SIDE\n",
        "                place -= 0\n", "relative error of dq"
    ),
    "stored gradients of the last tile of a power are lost": Mistake(
        0, "            if CONFIG.GRADIENTS:\n                store_gradients(ds, block, ",
        "            if CONFIG.SIGNS:\n                store_gradients(ds, block, ",
        "relative error of dq",
    ),
    "keys released before they are in registers": Mistake(
        0, f"    fence_async_shared()\n{RELEASE_LOADED}", RELEASE_LOADED, "relative error of d[kv]"
    ),
    "queries released before they are in registers": Mistake(
        1, f"    fence_async_shared()\n{RELEASE_LOADED}", RELEASE_LOADED, "relative error of dq"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_emulator_finds_mistake(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at, right, wrong, error = MISTAKES[name]
    broken = gluon_emulator.kernels(FILES[at], (right, wrong))
    in_registers, stored, compact = (each in name for each in ("registers", "stored", "compact"))
    power = 4 if "power" in name else 1
    options: dict[str, Any] = {
        "causal": not in_registers, "power": power, "separate": power > 1, "threshold": None,
        "group": 2, "sums": False,
        "lengths": (310, 150) if "padding" in name else None, "signs": False,
        "in_registers": in_registers, "stored_rows": 128 * stored, "compact": compact,
    }  # fmt: skip
    # With one streamed tile per step the producer loads the next resident tiles at once.
    sizes = ((600, 40, 1) if at else (40, 600, 1)) if in_registers else (330, 330, 2)
    monkeypatch.setattr(gluon_emulator, "PAUSES", (0.0, 0.004))
    # Control: the kernels without the mistake pass under the same settings.
    check(*sizes, **options, seed=0)
    sources = (*SOURCES[:at], broken, *SOURCES[at + 1 :])
    with pytest.raises(AssertionError, match=error):  # noqa: PT012 (the delays are random)
        for seed in range(20):
            check(*sizes, **options, seed=seed, sources=sources)


def overrides(kind: str, limit: int) -> dict[str, Any]:
    """Options of `tuning.override` by which dK/dV stores nothing, signs or score gradients.

    "compact" stores score gradients of visible blocks; "wide" and "three" nothing, with such tiles.
    """
    is_compact = kind == "compact"
    return {
        "sign_bytes": limit * (kind == "signs"),
        "gradient_bytes": limit * (kind == "gradients" or is_compact),
        "compact_gradients": is_compact,
        "product_rows": 128 if is_compact else None,
        "dkv_tile": "wide" if kind == "wide" else None,
        "dq_tile": kind if kind in ("wide", "three") else None,
    }


KINDS = ("nothing", "signs", "gradients", "compact", "wide", "three")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CASES = [
    Case("full", statistics=1),
    Case("causal", causal=True, gamma=True),
    Case("groups", heads=4, kv_heads=2, causal=True, gamma=True, threshold=0.3, statistics=1),
    Case("groups, full", heads=4, kv_heads=1, threshold=-0.3),
    Case("padding", batch=3, key_lengths=(0, 45, 10**6)),
    Case("causal padding", batch=2, causal=True, key_lengths=(10**6, 70), gamma=True),
    Case("learned thresholds", threshold=(0.4, -0.3), causal=True),
    Case("model", power=8, threshold=(-8.0, -4.0), row_normalise=1e-4, statistics=1),
    Case("causal model with padding", batch=2, causal=True, key_lengths=(10**6, 70), power=4,
         threshold=(-4.0, -2.0), row_normalise=1e-4),
    Case("row-normalised", gamma=True, row_normalise=1e-2, statistics=1),
    Case("squared", power=2, causal=True, threshold=0.2),
    Case("power eight", power=8, threshold=-4.0, row_normalise=1e-4, statistics=1),
    Case("power four with padding", batch=2, causal=True, power=4, threshold=-2.0,
         row_normalise=1e-4, key_lengths=(10**6, 70)),
]  # fmt: skip
# One, two, three and more tiles of queries and of keys, partial tiles, unequal lengths.
LENGTHS = (
    (1, 1), (64, 64), (65, 127), (130, 65), (128, 192), (257, 129), (70, 700), (700, 130),
    (333, 333), (1024, 1024),
)  # fmt: skip


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("stored", KINDS)
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_on_gpu_match_reference(case: Case, width: int, stored: str) -> None:
    has_kernels = case.causal if stored == "compact" else width == 64 and case.power > 1
    if stored in ("compact", "wide", "three") and not has_kernels:
        pytest.skip("the kernels are those of another kind")
    run_backward.BACKWARD_LAUNCHES.clear()
    for queries, keys in LENGTHS:
        if queries == 1 and (case.gamma or case.row_normalise):
            # A sum over one row can cancel, and one normalised weight is 1: only rounding is left.
            continue
        lengths = case.key_lengths and tuple(min(each, keys) for each in case.key_lengths)
        odd = replace(
            case, queries=queries, keys=keys, width=width, value_width=width, key_lengths=lengths
        )
        for transposed in (True, False):
            call = arguments(odd, torch.bfloat16, "cuda", transposed=transposed)
            with tuning.override(hopper=True, **overrides(stored, 64 << 20)):
                check_gradients(op.attend, call, 9e-3, 18e-3)
    launches = (x for pair in run_backward.BACKWARD_LAUNCHES.values() for x in pair)
    launched = {x.kernel.__name__ for x in launches if isinstance(x, HopperLaunch)}
    is_product = stored in ("gradients", "compact")
    dq = "hopper_dq_product_kernel" if is_product else "hopper_dq_kernel"
    assert launched == {"hopper_dkv_kernel", dq}


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("stored", KINDS[:4])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_many_tiles_per_program_match_portable_kernels(
    width: int, causal: bool, stored: str
) -> None:  # fmt: skip
    """Two runs give the same bits, also where memory holds what is stored of some heads only."""
    torch.manual_seed(0)
    tensors = torch.randn(4, 16, 1111, 16, width, device="cuda").bfloat16()
    q, k, v, grad = tensors.transpose(2, 3).unbind()
    leaves = [each.detach().requires_grad_() for each in (q, k, v)]
    results = []
    for hopper in (True, True, False):
        with tuning.override(hopper=hopper, **overrides(stored, 16 << 20)):
            out = relu_attention(*leaves, causal=causal, impl="triton")
            results.append(torch.autograd.grad(out, leaves, grad))
    assert all(torch.equal(*pair) for pair in zip(results[0], results[1], strict=True))
    for result, portable in zip(results[0], results[2], strict=True):
        assert (result.float() - portable.float()).norm() <= 4e-3 * portable.float().norm()


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("queries", [777, 1500, 2048])
def test_stored_gradients_change_only_the_order_of_sums(
    width: int, causal: bool, queries: int
) -> None:
    """dK and dV have the same bits; memory that is not written is NaN and must not be read."""
    torch.manual_seed(0)
    q, grad = (torch.randn(2, queries, 8, width, device="cuda").bfloat16() for _ in range(2))
    k, v = (torch.randn(2, 1100, 4, width, device="cuda").bfloat16() for _ in range(2))
    lengths = torch.tensor([1100, 431], device="cuda")
    leaves = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
    leaves.append(torch.linspace(-3, 1, 8, device="cuda").requires_grad_())
    found = []
    choices: list[dict[str, Any]] = [{"gradient_bytes": each} for each in (0, 1 << 30, 16 << 20)]
    choices += [{**choices[1], "product_rows": rows} for rows in (64, 128)]
    choices += [{**each, "compact_gradients": True} for each in choices[1:]]
    for choice in choices:
        out = relu_attention(
            *leaves[:3], threshold=leaves[3], power=4, row_normalise=1e-4, causal=causal,
            key_lengths=lengths, impl="triton",
        )  # fmt: skip
        # The allocator hands this memory out again.
        poison = torch.full((1 << 28,), float("nan"), device="cuda")
        del poison
        with tuning.override(hopper=True, **choice):
            found.append(torch.autograd.grad(out, leaves, grad.transpose(1, 2)))
    recomputed, stored, *others = found
    for other in others:
        assert all(torch.equal(*pair) for pair in zip(stored, other, strict=True))
    for at, (one, other) in enumerate(zip(recomputed, stored, strict=True)):
        if at in (1, 2):
            assert torch.equal(one, other)
        # The gradient of a threshold is a sum whose terms can cancel.
        tolerance = 2e-2 if at == 3 else 4e-3
        assert (one.float() - other.float()).norm() <= tolerance * one.float().norm()
