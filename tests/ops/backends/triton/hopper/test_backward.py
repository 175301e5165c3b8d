"""The specialised backward against the formula: in slow motion, and on the device (`-m gpu`)."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reluformer import relu_attention
from reluformer.ops.backends.triton import op, run_backward, tuning
from reluformer.ops.backends.triton.hopper.launch_forward import SpecialisedLaunch
from tests.ops.backends.triton import gluon_emulator
from tests.ops.rectified import Case, arguments
from tests.ops.rectified import check as check_gradients

FOLDER = Path(__file__).parents[5] / "reluformer/ops/backends/triton/hopper"
KEYS, QUERIES = FOLDER / "backward_dkv.py", FOLDER / "backward_dq.py"
SOURCES = (gluon_emulator.kernels(KEYS), gluon_emulator.kernels(QUERIES))
SIDE, WIDTH, BATCH = 64, 16, 2
# Three are the fewest of which one may be held and one given back unread.
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
    sources: tuple[dict[str, Any], dict[str, Any]] = SOURCES,
) -> tuple[list[Tensor], list[Tensor], float]:
    """(gradients of the kernels, of the reference, the size of the last one's terms).

    Of q, k and v and, if there is one, of the threshold, which adds up all rows and may cancel.
    """
    torch.manual_seed(seed)
    heads = group if group > 1 else 2
    kv_heads = heads // group
    q, grad = (torch.randn(BATCH, heads, queries, WIDTH).bfloat16() for _ in range(2))
    k, v = (torch.randn(BATCH, kv_heads, keys, WIDTH).bfloat16() for _ in range(2))
    grad_sum = torch.randn(BATCH, heads, queries) if sums else None
    gamma = torch.tensor([0.5 + 0.25 * h for h in range(heads)])
    scale = WIDTH**-0.5
    cuts = None if threshold is None else torch.full((heads,), threshold)
    # What the host prepares: dO and the terms times the factors of rows that differ.
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
    # Its rounding is not the kernels', and would be all that is left where terms cancel.
    rounded = torch.where(factor > 0, 1 / factor.double(), 0.0)[..., None] * grad
    wanted = _expected(
        [q, k, v], cuts, rounded, grad_sum, scale=scale, causal=causal, power=power,
        gamma=gamma.double(), key_lengths=None if lengths is None else torch.tensor(lengths),
    )  # fmt: skip
    for b, length in enumerate(lengths or ()):
        k[b, :, length:] = v[b, :, length:] = float("nan")
    padded = 256 * math.ceil(queries / 256)
    terms = torch.full((BATCH, heads, padded), 0.0)
    if grad_sum is not None:
        terms[..., :queries] = grad_sum * factor
    key_blocks = 2 * math.ceil(keys / 128)
    head_blocks = padded // SIDE * key_blocks
    # What nobody writes has all signs set.
    bits = torch.full((256 * (BATCH * heads * head_blocks + 8),), -1, dtype=torch.int16)
    found = [torch.full_like(each, float("nan")) for each in (q, k, v)]
    row_shift = torch.full((BATCH, heads, queries), float("nan"))
    describe = gluon_emulator.Descriptor
    read = [describe(each, SIDE) for each in (q, k, v, grad)]
    optional = [
        None if each is None else gluon_emulator.Pointer(each)
        for each in (
            terms if sums else None,
            gamma,
            cuts,
            None if lengths is None else torch.tensor(lengths),
        )
    ]
    switches = {
        "GROUP": group, "D": WIDTH, "ROWS": SIDE, "SIDE": SIDE, "STAGES": STAGES,
        "CAUSAL": causal, "POWER": power, "HAS_THRESHOLD": threshold is not None,
        "PRESCALE": power > 2, "GRADS": sums, "ROW_SCALE": per_row, "SIGNS": signs,
        "IN_REGISTERS": in_registers,
    }  # fmt: skip
    numbers = (scale, unit, 0.0, 0.5)
    for at, (owned, length) in enumerate(((kv_heads, keys), (heads, queries))):
        tiles = math.ceil(length / (2 * SIDE))
        items = BATCH * owned * (math.ceil(tiles / 2) if causal else tiles)
        sizes = (items, owned, tiles, queries, keys, key_blocks, head_blocks, padded)
        words = gluon_emulator.Pointer(bits.view(torch.int32) if at else bits) if signs else None
        outs: list[Any] = [describe(each, SIDE) for each in (found[:1] if at else found[1:])]
        if at:
            outs.append(None if cuts is None else gluon_emulator.Pointer(row_shift))
        name = ("specialised_keys_kernel", "specialised_queries_kernel")[at]
        gluon_emulator.launch(
            sources[at][name], min(programs, items), *read, *outs, words, *optional,
            *map(torch.tensor, sizes), *numbers, seed=seed, **switches,
        )  # fmt: skip
    if cuts is not None:
        found.append(-row_shift.sum((0, 2)))
    return found, wanted, float(row_shift.norm())


def _expected(
    tensors: list[Tensor],
    cuts: Tensor | None,
    grad: Tensor,
    grad_sum: Tensor | None,
    **options: Any,
) -> list[Tensor]:
    leaves = [each.double().requires_grad_() for each in tensors]
    if cuts is not None:
        leaves.append(cuts.double().requires_grad_())
        options["threshold"] = leaves[-1]
    made = relu_attention(*leaves[:3], **options, return_sums="row_sum", impl="reference")
    total = (made.output * grad.double()).sum()
    if grad_sum is not None:
        total = total + (made.sums.row_sum * grad_sum.double()).sum()
    return list(torch.autograd.grad(total, leaves))


def check(*args: int, **options: Any) -> None:
    found, wanted, size = gradients(*args, **options)
    for name, one, other in zip(("dq", "dk", "dv", "threshold"), found, wanted, strict=False):
        least = max(size, 1e-6) if name == "threshold" else 1e-6
        far = (one.double() - other).norm() / other.norm().clamp_min(least)
        assert far < 12e-3, f"{name}: {far:.2e}"


@settings(max_examples=16, deadline=None)
@given(
    queries=st.integers(1, 300),
    keys=st.integers(1, 300),
    programs=st.integers(1, 4),
    causal=st.booleans(),
    power=st.sampled_from((1, 1, 1, 2, 4, 8)),
    threshold=st.sampled_from((None, -0.5, 0.25)),
    padded=st.booleans(),
    group=st.sampled_from((1, 2)),
    sums=st.booleans(),
    signs=st.booleans(),
    in_registers=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_matches_the_formula_whatever_comes_late(
    queries: int, keys: int, programs: int, causal: bool, power: int, threshold: float | None,
    padded: bool, group: int, sums: bool, signs: bool, in_registers: bool, seed: int,
) -> None:  # fmt: skip
    lengths = (keys * 2 // 3, seed % (keys + 1)) if padded else None
    check(
        queries, keys, programs, causal=causal, power=power, threshold=threshold, lengths=lengths,
        group=group, sums=sums, signs=signs and power == 1, in_registers=in_registers, seed=seed,
    )  # fmt: skip


ARRIVE = "mbarrier.arrive(empty.index(held), count=1)"
# (file, text, what it becomes): each is a mistake that a GPU might forgive on most days.
MISTAKES = {
    "queries released before they are read": (
        0, "                    dp, dk_acc = warpgroup_mma_wait(0, [dp, dk_acc])\n",
        f"                    {ARRIVE}\n"
        "                    dp, dk_acc = warpgroup_mma_wait(0, [dp, dk_acc])\n",
    ),
    "keys released before they are read": (
        1, f"                acc = warpgroup_mma_wait(0, [acc])\n                {ARRIVE}",
        f"                {ARRIVE}\n                acc = warpgroup_mma_wait(0, [acc])",
    ),
    "a full buffer is filled again": (0, "    phase = 1\n", "    phase = 0\n"),
    "unread tiles are kept": (1, "phase, count - mine, STAGES)", "phase, count * 0, STAGES)"),
    "tiles of a group are read by the wrong head": (
        0, "many = gl.where(member > 0, low - first, 0)", "many = gl.where(member > 0, 0, 0)"
    ),
    "keys of padding are read": (1, "            keys = clean(", "            clean("),
    "a gradient is overwritten before it is stored": (
        0, "    tma.store_wait(0)\n    gl.thread_barrier()\n    buf",
        "    gl.thread_barrier()\n    buf",
    ),
    "keys released before registers have them": (
        0, "    fence_async_shared()\n    gl.thread_barrier()\n    mbarrier.arrive(empty",
        "    gl.thread_barrier()\n    mbarrier.arrive(empty",
    ),
    "queries released before registers have them": (
        1, "    fence_async_shared()\n    gl.thread_barrier()\n    mbarrier.arrive(empty",
        "    gl.thread_barrier()\n    mbarrier.arrive(empty",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_slow_motion_sees_a_mistake(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at, *change = MISTAKES[name]
    broken = gluon_emulator.kernels((KEYS, QUERIES)[at], (change[0], change[1]))
    in_registers = "registers" in name
    options: dict[str, Any] = {
        "causal": not in_registers, "power": 1, "threshold": None, "group": 2, "sums": False,
        "lengths": (310, 150) if "padding" in name else None, "signs": False,
        "in_registers": in_registers,
    }  # fmt: skip
    # With one tile to walk the producer is ready for the next turn at once.
    sizes = ((600, 40, 1) if at else (40, 600, 1)) if in_registers else (330, 330, 2)
    check(*sizes, **options, seed=0)
    monkeypatch.setattr(gluon_emulator, "PATIENCE", 0.5)
    monkeypatch.setattr(gluon_emulator, "PAUSES", (0.0, 0.004))
    sources = (SOURCES[0], broken) if at else (broken, SOURCES[1])
    with pytest.raises(AssertionError):  # noqa: PT012 (what comes when is a matter of chance)
        for seed in range(20):
            check(*sizes, **options, seed=seed, sources=sources)


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
    Case("divided", gamma=True, row_normalise=1e-2, statistics=1),
    Case("squared", power=2, causal=True, threshold=0.2),
    Case("power eight", power=8, threshold=-4.0, row_normalise=1e-4, statistics=1),
    Case("power four with padding", batch=2, causal=True, power=4, threshold=-2.0, row_normalise=1e-4,
         key_lengths=(10**6, 70)),
]  # fmt: skip
# One, two, three and more tiles of either, parts of tiles, more of one than of the other.
LENGTHS = (
    (1, 1), (64, 64), (65, 127), (130, 65), (128, 192), (257, 129), (70, 700), (700, 130),
    (333, 333), (1024, 1024),
)  # fmt: skip


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("sign_bytes", [0, 64 << 20])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_formula_on_the_device(case: Case, width: int, sign_bytes: int) -> None:
    run_backward.BACKWARD_LAUNCHES.clear()
    for queries, keys in LENGTHS:
        if queries == 1 and (case.gamma or case.row_normalise):
            # A sum over one row may cancel, a quotient of one weight is 1: rounding is all of it.
            continue
        lengths = case.key_lengths and tuple(min(each, keys) for each in case.key_lengths)
        odd = replace(
            case, queries=queries, keys=keys, width=width, value_width=width, key_lengths=lengths
        )
        for transposed in (True, False):
            call = arguments(odd, torch.bfloat16, "cuda", transposed=transposed)
            with tuning.override(specialised=True, sign_bytes=sign_bytes):
                check_gradients(op.attend, call, 9e-3, 18e-3)
    passes = run_backward.BACKWARD_LAUNCHES.values()
    launched = {each.kernel.__name__ for launches in passes for each in launches if _special(each)}
    assert launched >= {"specialised_keys_kernel", "specialised_queries_kernel"}


def _special(launch: object) -> bool:
    return isinstance(launch, SpecialisedLaunch)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("sign_bytes", [0, 16 << 20])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_many_tiles_a_program_give_what_the_plain_kernels_give(
    width: int, causal: bool, sign_bytes: int
) -> None:
    """Twice the same bits, and those of some heads at a time where signs have little memory."""
    torch.manual_seed(0)
    made = torch.randn(4, 16, 1111, 16, width, device="cuda").bfloat16()
    q, k, v, grad = made.transpose(2, 3).unbind()
    leaves = [each.detach().requires_grad_() for each in (q, k, v)]
    results = []
    for specialised in (True, True, False):
        with tuning.override(specialised=specialised, sign_bytes=sign_bytes):
            out = relu_attention(*leaves, causal=causal, impl="triton")
            results.append(torch.autograd.grad(out, leaves, grad))
    assert all(torch.equal(*pair) for pair in zip(results[0], results[1], strict=True))
    for found, plain in zip(results[0], results[2], strict=True):
        assert (found.float() - plain.float()).norm() <= 4e-3 * plain.float().norm()
