"""Which calls run on the Hopper kernels; a Hopper GPU is pretended."""

from typing import Any

import pytest
import torch

from reluformer.ops.backends.triton import (
    backward_choice,
    launch,
    plan,
    run_backward,
    tuning,
    versions,
)
from reluformer.ops.backends.triton.backward_launches import Results, prepare
from reluformer.ops.backends.triton.hopper import launch_backward, launch_forward
from reluformer.ops.backends.triton.problem import NO_INPUTS, Problem, Settings
from tests.ops.backends.triton.problems import with_changes


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (launch_forward, launch_backward):
        monkeypatch.setattr(module, "is_supported_gpu", lambda tensor: True)
    monkeypatch.setattr(versions, "runs_recent_hopper", lambda: True)


def problem(width: int, n: int, *, batch: int = 4, heads: int = 8, **changes: Any) -> Problem:
    q, k, v = (torch.empty(batch, heads, n, width, dtype=torch.bfloat16) for _ in range(3))
    return with_changes(Problem(q, k, v, NO_INPUTS, Settings(width**-0.5, n, n)), changes)


def forward(call: Problem, statistics: int = 0) -> bool:
    with tuning.override(tma=True):
        return launch_forward.should_use(call, statistics, torch.empty_like(call.q))


def backward(call: Problem, level: int = 0, sign_bytes: int | None = None) -> tuple[bool, bool]:
    """(whether a backward runs on the Hopper kernels, whether it stores signs)."""
    with tuning.override(tma=True, sign_bytes=sign_bytes):
        choice = backward_choice.choose(call, level, torch.empty_like(call.q))
    return choice.uses_hopper, choice.sign_heads > 0


@pytest.mark.parametrize("width", [64, 128])
def test_forward_uses_hopper_for_long_sequences(width: int) -> None:
    assert forward(problem(width, 256)) and forward(problem(width, 4096), statistics=1)
    assert not forward(problem(width, 255))
    assert not forward(problem(width, 511, causal=True))
    assert forward(problem(width, 512, causal=True))
    assert not forward(problem(width, 4096, window=64))
    assert not forward(problem(width, 4096, dropout_p=0.1))
    assert not forward(problem(width, 4096, mask=torch.ones(1, 1, 4096, 4096, dtype=torch.bool)))


def test_forward_uses_hopper_later_for_causal_power_8_at_width_64() -> None:
    assert forward(problem(64, 512, causal=True, power=4, threshold=torch.empty(8)))
    assert not forward(problem(64, 1024, causal=True, power=8, threshold=torch.empty(8)))
    assert forward(problem(64, 2048, causal=True, power=8, threshold=torch.empty(8)))
    assert forward(problem(128, 1024, causal=True, power=8, threshold=torch.empty(8)))


def test_forward_uses_hopper_only_for_sampled_entropies_at_width_128() -> None:
    assert forward(problem(128, 1024, entropy_every=8), statistics=2)
    assert not forward(problem(128, 1024), statistics=2)
    assert not forward(problem(64, 1024, entropy_every=8), statistics=2)


def test_forward_uses_hopper_for_packed_sequences_without_entropies() -> None:
    ends = torch.arange(5, dtype=torch.int32) * 1024
    packed = problem(128, 4096, batch=1, cu_q=ends, cu_k=ends, max_q=1024, max_k=1024)
    assert forward(packed, statistics=1)
    assert not forward(with_changes(packed, {"entropy_every": 8}), statistics=2)
    many = torch.zeros(8194, dtype=torch.int32)
    assert not forward(with_changes(packed, {"cu_q": many, "cu_k": many}))
    assert backward(packed) == (False, False)


def test_backward_at_width_128_stores_signs_of_long_sequences() -> None:
    assert backward(problem(128, 256)) == (True, False)
    assert backward(problem(128, 1024, causal=True)) == (True, True)
    assert backward(problem(128, 8192), level=1) == (True, True)
    assert backward(problem(128, 1024, power=2)) == (True, False)
    assert backward(problem(128, 128)) == (False, False)


def test_backward_at_width_64_stores_signs_only_with_the_portable_kernels() -> None:
    assert backward(problem(64, 1024, causal=True)) == (True, False)
    assert backward(problem(64, 512)) == (True, False)
    assert backward(problem(64, 1024)) == (False, True)
    assert backward(problem(64, 1024), sign_bytes=0) == (True, False)
    assert backward(problem(64, 4096, power=8, threshold=torch.empty(8))) == (True, False)


def gradient_heads(call: Problem, level: int = 0, limit: int | None = None) -> int:
    """Heads whose score gradients are stored at a time."""
    with tuning.override(tma=True, gradient_bytes=limit):
        choice = backward_choice.choose(call, level, torch.empty_like(call.q))
    assert choice.gradient_heads == 0 or choice.sign_heads == 0
    return choice.gradient_heads


def test_backward_stores_score_gradients_in_limited_memory() -> None:
    call = problem(128, 4096, power=4, threshold=torch.empty(8))
    # A head of 4096 queries and keys takes 32 MiB.
    assert gradient_heads(call, limit=100 << 20) == 3
    assert gradient_heads(call, limit=1 << 40) == 32, "all heads"
    assert gradient_heads(call, limit=31 << 20) == gradient_heads(call, limit=0) == 0
    assert gradient_heads(call, level=2, limit=1 << 40) == 0, "the portable kernels run"
    assert gradient_heads(call) == 16, "512 MiB"
    shared = call._replace(k=call.k[:, :1], v=call.v[:, :1])
    assert gradient_heads(shared, limit=256 << 20) == 8
    assert gradient_heads(shared, limit=255 << 20) == 0, "heads that share keys do not fit"


def compact_heads(call: Problem, limit: int) -> int:
    """`gradient_heads` where blocks that no row sees take no memory."""
    with tuning.override(tma=True, gradient_bytes=limit, compact_gradients=True):
        return backward_choice.choose(call, 0, torch.empty_like(call.q)).gradient_heads


def test_compact_score_gradients_take_memory_for_visible_blocks_only() -> None:
    call = problem(128, 4096, power=4, causal=True)
    # 64 x 65 / 2 blocks of 8 KiB for a head.
    assert compact_heads(call, 65 << 20) == 4 and compact_heads(call, (65 << 20) - 1) == 3
    assert gradient_heads(call, limit=65 << 20) == 2
    full = problem(128, 4096, power=4)
    assert compact_heads(full, 65 << 20) == gradient_heads(full, limit=65 << 20) == 2
    # Queries at the end of twice as many keys: 64 key blocks that all see, then the triangle.
    longer = problem(128, 4096, power=4, causal=True, max_k=8192)
    assert compact_heads(longer, 8192 * (64 * 64 + 64 * 65 // 2)) == 1
    assert compact_heads(longer, 8192 * (64 * 64 + 64 * 65 // 2) - 1) == 0


def backward_configs(
    call: Problem, *, gradients: bool = False, **choice: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of the kernels for dK and dV and for dQ, by name."""
    grad = torch.empty_like(call.q)
    with tuning.override(tma=True, **choice):
        dkv = launch_backward.dkv_launch(
            call, 0, grad, call.k, call.v, signs=False, gradients=gradients
        )
        if gradients:
            dq = launch_backward.dq_product_launch(call, call.q, 1)
        else:
            dq = launch_backward.dq_launch(call, 0, grad, call.q, signs=False)
    configs = [each.options["CONFIG"] for each in (dkv, dq)]
    dkv_options, dq_options = (
        {name: value.value for name, value in each._asdict().items()} for each in configs
    )
    return dkv_options, dq_options


@pytest.mark.parametrize(
    ("call", "takes_dkv", "takes_dq"),
    [
        (problem(64, 1000, power=4), True, True),
        (problem(64, 1024, power=2), True, True),
        (problem(64, 1024, power=8), False, True),
        (problem(64, 1024, power=4, causal=True), False, True),
        (problem(64, 1024), False, False),
        (problem(128, 1024, power=4), False, False),
    ],
)
def test_requested_backward_tiles_where_registers_suffice(
    call: Problem, takes_dkv: bool, takes_dq: bool
) -> None:
    dkv, dq = backward_configs(call, dkv_tile="wide", dq_tile="wide")
    assert (dkv["COLS"] == 128) == takes_dkv and (dq["COLS"] == 128) == takes_dq
    # Both kinds of scores at once would need more registers.
    assert not (takes_dkv and dkv["SEPARATE_SCORES"])
    assert dq["RAGGED"] == (call.settings.max_k == 1000)
    dkv, dq = backward_configs(call, dq_tile="three")
    assert dkv["COLS"] == dq["COLS"] == 64 and dkv["CONSUMERS"] == 2
    assert dq["CONSUMERS"] == (3 if takes_dq else 2)
    dkv, dq = backward_configs(call, gradients=True, dkv_tile="wide", dq_tile="three")
    assert dkv["COLS"] == 64, "score gradients are stored in blocks of 64"
    assert dq["CONSUMERS"] == 2, "the product has its own tiles"


@pytest.mark.parametrize(("tile", "has_pass"), [(None, False), ("wide", True)])
def test_row_terms_are_written_for_whole_tiles(tile: str | None, has_pass: bool) -> None:
    call = problem(64, 1000, power=4, row_normalise=1e-4)
    rows = torch.empty(call.q.shape[:3])
    grads = run_backward.Gradients(torch.empty_like(call.q), torch.empty_like(call.q), row_sum=rows)
    results = Results(call.q, call.k, call.v, rows, None)
    with tuning.override(tma=True, dkv_tile=tile):
        launches = prepare(call, grads, results, backward_choice.Choice(True, 0))
    # The pass over output gradients writes terms in tiles of 64 rows.
    assert launches.has_terms and (launches.row_terms is not None) == has_pass


def test_rows_of_the_product_with_stored_gradients() -> None:
    for causal, usual in ((False, 128), (True, 64)):
        call = problem(128, 1024, power=4, causal=causal)
        for requested in (None, 64, 128):
            _, dq = backward_configs(call, gradients=True, product_rows=requested)
            assert dq["ROWS"] == (requested or usual)
            assert not dq["COMPACT"]
        dkv, dq = backward_configs(call, gradients=True, compact_gradients=True)
        assert dkv["COMPACT"] == dq["COMPACT"] == causal


def test_score_gradients_are_stored_where_that_is_faster() -> None:
    for faster in (
        problem(128, 1024, power=2),
        problem(128, 8192, power=4),
        problem(128, 4096, power=4, causal=True),
        problem(128, 4096),
        problem(128, 8192, row_normalise=1.0),
    ):
        assert gradient_heads(faster) > 0
    for slower in (
        problem(128, 8192),
        problem(128, 4096, power=2, causal=True),
        problem(128, 2048, power=8, causal=True),
        problem(128, 8192, row_normalise=1.0, causal=True),
        problem(128, 512, power=4),
        problem(128, 16_384, power=4),
        problem(64, 4096, power=4),
    ):
        assert gradient_heads(slower) == 0


def test_entropy_gradients_and_float16_run_on_the_portable_kernels() -> None:
    assert not backward(problem(128, 1024), level=2)[0]
    half = problem(128, 1024)
    half = half._replace(q=half.q.half(), k=half.k.half(), v=half.v.half())
    assert not backward(half)[0] and not forward(half)


def test_hopper_needs_as_many_tiles_as_multiprocessors() -> None:
    # The CPU counts as 4 multiprocessors. One head of 512 rows has 4 tiles.
    assert forward(problem(128, 512, batch=1, heads=1))
    assert not forward(problem(128, 256, batch=1, heads=1))
    assert not backward(problem(128, 256, batch=1, heads=1))[0]


def test_backward_is_prepared_once_per_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 1, 20, 16)
    call = Problem(q, q, q, NO_INPUTS, Settings(0.25, 20, 20))
    grads = run_backward.Gradients(torch.randn_like(q))
    first = run_backward.backward(call, grads, False)
    monkeypatch.setattr(run_backward, "choose", lambda *args: pytest.fail("chosen again"))
    monkeypatch.setattr(
        run_backward.backward_launches, "prepare", lambda *args, **kw: pytest.fail("prepared again")
    )
    second = run_backward.backward(call, grads, False)
    assert all(torch.equal(one, other) for one, other in zip(first[:3], second[:3], strict=True))


def test_signatures_tell_aligned_addresses_from_others() -> None:
    room = torch.zeros(65)
    first, *others = (launch.signature(("numbers",), (room[at : at + 60],)) for at in (0, 1, 2, 4))
    assert others[0] == others[1] != first == others[2]


def test_full_memory_is_cleared() -> None:
    memory: launch.Memory[int] = launch.Memory()
    for number in range(launch._LIMIT):
        memory.put((number,), number)
    assert len(memory) == launch._LIMIT and memory.put(("one more",), 1) == 1
    assert memory == {("one more",): 1}


def test_override_forces_or_forbids_hopper() -> None:
    small = problem(64, 16)
    out = torch.empty_like(small.q)
    with tuning.override(tma=True, hopper=True):
        assert launch_forward.should_use(small, 0, out)
    with tuning.override(tma=True, hopper=False):
        assert not launch_forward.should_use(problem(64, 4096), 0, out)


def test_untested_versions_use_neither_stored_gradients_nor_newer_tiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(versions, "runs_recent_hopper", lambda: False)
    call = problem(128, 4096, power=4)
    assert gradient_heads(call) == 0 and gradient_heads(call, limit=1 << 40) > 0
    assert tile(problem(64, 4096, power=4)) == tile(problem(128, 4096, power=4)) == "two"
    assert tile(problem(64, 4096, power=4), forced="three") == "three"


def tile(call: Problem, statistics: int = 0, forced: str | None = None) -> str:
    """Name of the tile that the forward kernel is launched with."""
    with tuning.override(tma=True, forward_tile=forced):
        launched = launch_forward.forward_launch(call, statistics, torch.empty_like(call.q))
    config = launched.options["CONFIG"]
    sizes = (config.CONSUMERS, config.ROWS, config.KEYS, config.CONVERT_LATE)
    launched_tile = tuple(each.value for each in sizes)
    for (width, name), each in launch_forward.TILES.items():
        same = (each.consumers, each.rows, each.keys, each.converts_late) == launched_tile
        if same and width == call.q.shape[-1]:
            return name
    raise AssertionError(f"no tile has {launched_tile}")


def test_tile_of_powers_at_width_64() -> None:
    assert tile(problem(64, 4096, power=4), 1) == "three"
    assert tile(problem(64, 16_384, power=4, causal=True)) == "three"
    assert tile(problem(64, 16_384, power=2, causal=True)) == "late"
    assert tile(problem(64, 4096, power=4, causal=True)) == "late"
    assert tile(problem(64, 2048, power=4)) == "late"
    assert tile(problem(64, 2048, power=2)) == "two"


def test_tile_of_power_1_at_width_64() -> None:
    assert tile(problem(64, 4096)) == tile(problem(64, 16_384, causal=True)) == "two"
    assert tile(problem(64, 16_384)) == "three"


def test_tile_of_powers_at_width_128() -> None:
    assert tile(problem(128, 4096, power=2)) == "late"
    assert tile(problem(128, 4096, power=4, causal=True), 1) == "late"
    assert tile(problem(128, 2048, power=4)) == tile(problem(128, 4096)) == "two"


def test_requested_tile_replaces_the_default() -> None:
    assert tile(problem(64, 4096, power=4), forced="two") == "two"
    assert tile(problem(64, 300), forced="three") == "three"
    assert tile(problem(128, 300, power=4), forced="late") == "late"
    # Not supported: other widths and entropies.
    assert tile(problem(128, 4096, power=4), forced="three") == "late"
    assert tile(problem(64, 4096, power=4, entropy_every=8), 2, forced="three") == "two"


@pytest.mark.parametrize(
    ("shared", "expected"),
    # H200; A100, where only dK and dV need another tile; RTX 4090.
    [(227, (False, False, False)), (163, (False, True, False)), (99, (True, True, True))],
)
def test_smaller_tiles_where_shared_memory_is_small(
    shared: int, expected: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    call, kernels = problem(128, 4096), ("forward", "dkv", "dq")
    usual = [plan.pick_tile(call, kernel) for kernel in kernels]
    narrow = [plan.pick_tile(problem(64, 4096), kernel) for kernel in kernels]
    monkeypatch.setattr(plan, "shared_memory", lambda problem: shared * 1024)
    tiles = [plan.pick_tile(call, kernel) for kernel in kernels]
    assert tuple(one != other for one, other in zip(tiles, usual, strict=True)) == expected
    assert all(
        one.queries * one.keys <= other.queries * other.keys
        for one, other in zip(tiles, usual, strict=True)
    )
    assert [plan.pick_tile(problem(64, 4096), kernel) for kernel in kernels] == narrow
