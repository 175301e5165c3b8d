"""The compiled kernels against the formula, beyond the sizes of one tile and of one thread."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from reluformer.ops.api import relu_attention
from reluformer.ops.backends.cpu import op, tables
from reluformer.ops.backends.cpu.native import library
from reluformer.ops.backends.cpu.plan import make_plan
from reluformer.ops.call import Call
from reluformer.ops.rule import Rectified
from reluformer.ops.visibility import Visibility
from tests.ops.rectified import Case, arguments, check, error, expected, found, run_kernel, visible

BOUNDS = {torch.float32: 3e-6, torch.bfloat16: 8e-3}

# Longer than a tile in either direction, and no multiple of anything.
LONG = Case("", queries=171, keys=203, width=40, value_width=72)


@pytest.fixture(autouse=True)
def only_compiled(compiled: library.Kernels, monkeypatch: pytest.MonkeyPatch) -> library.Kernels:
    """Nothing here may run on tiles."""
    monkeypatch.setattr(tables, "forward", None)
    monkeypatch.setattr(tables, "backward", None)
    return compiled


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest, compiled: library.Kernels) -> torch.dtype:
    if request.param == torch.bfloat16 and compiled.bf16_products is None:
        pytest.skip("the system forbids the AMX tiles of this processor")
    kind: torch.dtype = request.param
    return kind


@pytest.fixture
def threads() -> Iterator[None]:
    """As many threads as make every table be shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(5)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "case",
    [
        LONG,
        replace(LONG, causal=True, gamma=True),
        replace(LONG, causal=True, queries=203, keys=171, power=2),
        replace(LONG, window=37, statistics=1, row_normalise=0.1),
        replace(LONG, causal=True, window=90, threshold=(-0.4, 0.3)),
        replace(LONG, batch=2, key_lengths=(203, 77), threshold=-0.2, statistics=1),
        replace(LONG, batch=2, key_lengths=(0, 150), causal=True, power=4, threshold=(-0.5, 0.1)),
        replace(LONG, heads=6, kv_heads=2, causal=True, row_normalise=0.5, gamma=True),
        replace(LONG, width=33, value_width=7),
        replace(LONG, width=1, value_width=1, threshold=-0.3),
        replace(LONG, batch=2, mask=(2, 1, 1, 203), causal=True, power=4, threshold=(-0.5, 0.1)),
        replace(LONG, heads=4, mask=(1, 4, 171, 203), row_normalise=0.1, gamma=True, statistics=1),
        replace(LONG, batch=2, mask=(1, 2, 171, 1), key_lengths=(203, 77), window=90),
    ],
    ids=lambda case: "-".join(
        f"{name}={value}" for name, value in vars(case).items() if value != getattr(LONG, name)
    ),
)
def test_matches_the_formula(case: Case, dtype: torch.dtype, threads: None) -> None:
    bound = BOUNDS[dtype]
    check(op.attend, arguments(case, dtype, "cpu"), bound, 3 * bound)


@given(
    rows=st.integers(1, 70),
    keys=st.integers(1, 150),
    groups=st.sampled_from([1, 3]),
    width=st.sampled_from([3, 16, 64]),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 80),
    lengths=st.none() | st.tuples(st.integers(-1, 151), st.integers(-1, 151)),
    masked=st.none() | st.tuples(*[st.booleans()] * 4),
    power=st.sampled_from([1, 2, 4, 8]),
    threshold=st.sampled_from([0.0, -0.3]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_shape_and_rule(
    dtype: torch.dtype,
    rows: int,
    keys: int,
    groups: int,
    width: int,
    causal: bool,
    window: int | None,
    lengths: tuple[int, int] | None,
    masked: tuple[bool, ...] | None,
    power: int,
    threshold: float,
) -> None:
    shape = (2, 2 * groups, rows, keys)
    mask = masked and tuple(size if own else 1 for size, own in zip(shape, masked, strict=True))
    case = Case(
        "", batch=2, heads=2 * groups, queries=rows, keys=keys, width=width, value_width=width,
        causal=causal, window=window, key_lengths=lengths, mask=mask, power=power,
        threshold=threshold, statistics=1,
    )  # fmt: skip
    bound = BOUNDS[dtype] * max(1, power / 2)
    check(op.attend, arguments(case, dtype, "cpu"), bound, 3 * bound)


@pytest.mark.parametrize("laid", ["by token", "by head", "features last but one"])
@pytest.mark.parametrize("width", [5, 64, 96])
@pytest.mark.parametrize("rows", [1, 3])
def test_decodes_a_long_cache(rows: int, width: int, laid: str, threads: None) -> None:
    case = Case(
        "", batch=2, queries=rows, keys=2311, width=width, value_width=width, causal=True,
        key_lengths=(2311, 1700), threshold=(0.3, -0.1), gamma=True, statistics=1,
        row_normalise=0.2,
    )  # fmt: skip
    for dtype, bound in BOUNDS.items():
        given = arguments(case, dtype, "cpu", transposed=laid == "by token")
        wanted, _ = expected(given)
        q, k, v = (given.leaves[name].detach() for name in "qkv")
        if laid == "features last but one":
            k, v = (each.transpose(2, 3).contiguous().transpose(2, 3) for each in (k, v))
        with torch.no_grad():
            out, sums, _ = run_kernel(op.attend, q, k, v, given.options)
        assert error(out, wanted[0]) <= bound
        assert error(sums, wanted[1]) <= bound


@pytest.mark.parametrize(
    "case",
    [
        Case("", keys=1303, width=64, value_width=64, threshold=(0.3, -0.1), gamma=True),
        Case("", keys=1303, heads=6, width=5, value_width=37, row_normalise=0.2, power=2),
        Case("", batch=2, keys=1303, key_lengths=(1303, 700), statistics=1, threshold=-0.5),
        Case("", batch=2, keys=45, key_lengths=(0, 40), row_normalise=0.1, gamma=True),
        Case("", batch=2, keys=1303, mask=(2, 1, 1, 1303), row_normalise=0.1, gamma=True),
    ],
    ids=["long", "groups", "padding", "short", "mask"],
)
@pytest.mark.parametrize(
    ("queries", "rules"), [(1, {}), (3, {"causal": True}), (3, {"causal": True, "window": 600})]
)
def test_gradients_of_a_few_rows(
    case: Case, queries: int, rules: dict[str, Any], dtype: torch.dtype, threads: None
) -> None:
    bound = BOUNDS[dtype]
    case = replace(case, queries=queries, **rules)
    check(op.attend, arguments(case, dtype, "cpu"), bound, 3 * bound)


def test_a_few_rows_read_visible_keys_only() -> None:
    q, k, v = (torch.randn(1, 2, 3 if name == "q" else 45, 16) for name in "qkv")
    spoilt = k.clone()
    # Only the last row sees it.
    spoilt[:, :, -1] = torch.nan

    def gradients(keys: torch.Tensor) -> list[torch.Tensor]:
        leaves = [each.clone().requires_grad_() for each in (q, keys, v)]
        output = relu_attention(*leaves, causal=True, threshold=-1.0, impl="cpu")
        return [output, *torch.autograd.grad(output.sum(), leaves)]

    wanted, found = gradients(k), gradients(spoilt)
    for one, other in zip(wanted[:2], found[:2], strict=True):
        assert torch.equal(one[:, :, :2], other[:, :, :2]) and other[:, :, 2].isnan().all()


@pytest.mark.parametrize(("rows", "keys"), [(1, 30), (20, 23), (9, 127)])
def test_short_rows_of_bfloat16_are_rounded_once(rows: int, keys: int) -> None:
    lengths = (rows, keys, keys, rows)
    q, k, v, grad = (torch.randn(2, 4, length, 24).bfloat16() for length in lengths)
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        leaves = [each.to(dtype).requires_grad_() for each in (q, k, v)]
        gamma, threshold = (torch.full((4,), x, requires_grad=True) for x in (1.3, -0.3))
        options = {"gamma": gamma, "threshold": threshold, "row_normalise": 0.1, "power": 4}
        output = relu_attention(*leaves, causal=True, impl="cpu", **options)
        found = torch.autograd.grad(output, (*leaves, gamma, threshold), grad.to(dtype))
        results.append([output.detach(), *found])
    for narrow, wide in zip(*results, strict=True):
        torch.testing.assert_close(narrow, wide.to(narrow.dtype), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_padding_may_hold_anything(rows: int, dtype: torch.dtype) -> None:
    given = arguments(Case("", batch=2, queries=rows, keys=99, key_lengths=(70, 0)), dtype, "cpu")
    outputs, grads = found(op.attend, given)
    hidden = ~visible(given.options, (2, 2, rows, 99))[:, :, 0, :, None]
    for nonsense in (torch.nan, torch.inf):
        for name in "kv":
            with torch.no_grad():
                given.leaves[name].masked_fill_(hidden, nonsense)
        others, other_grads = found(op.attend, given)
        assert torch.equal(others[0], outputs[0])
        assert all(torch.equal(other_grads[name], grads[name]) for name in grads)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("laid", ["whole", "transposed", "sliced", "expanded"])
def test_masks_are_read_where_they_lie(laid: str, rows: int, dtype: torch.dtype) -> None:
    given = arguments(Case("", batch=2, queries=rows, keys=99, mask=(2, 2, rows, 99)), dtype, "cpu")
    mask = given.options["mask"]
    if laid == "transposed":
        mask = mask.transpose(2, 3).contiguous().transpose(2, 3)
    elif laid == "sliced":
        mask = torch.nn.functional.pad(mask, (3, 4, 1, 2), value=True)[:, :, 1:-2, 3:-4]
    elif laid == "expanded":
        mask = mask[:, :1, :1].expand(mask.shape)
    given.options["mask"] = mask
    check(op.attend, given, BOUNDS[dtype], 3 * BOUNDS[dtype])


def test_a_mask_may_change_before_the_backward_pass() -> None:
    given = arguments(Case("", keys=99, mask=(1, 1, 1, 99)), torch.float32, "cpu")
    _, wanted = expected(given)
    output = run_kernel(op.attend, *(given.leaves[name] for name in "qkv"), given.options).output
    given.options["mask"].fill_(True)
    output.backward(given.cotangents[0])
    for name, leaf in given.leaves.items():
        assert leaf.grad is not None and error(leaf.grad, wanted[name]) <= 1e-5


def test_a_visible_nan_is_not_hidden() -> None:
    for rows in (1, 40):
        q, k, v = (torch.randn(1, 2, rows if name == "q" else 99, 16) for name in "qkv")
        k[0, 1, 42, 3] = torch.nan
        out = relu_attention(q, k, v, impl="cpu")
        assert out[0, 1].isnan().all() and out[0, 0].isfinite().all()


def test_threads_change_nothing_that_matters(dtype: torch.dtype) -> None:
    given = arguments(replace(LONG, queries=700, keys=1100, causal=True), dtype, "cpu")
    outputs, grads = found(op.attend, given)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        shared, shared_grads = found(op.attend, given)
        again, again_grads = found(op.attend, given)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(shared[0], outputs[0])
    assert error(shared_grads["q"], grads["q"]) < 5e-3
    assert all(torch.equal(again_grads[name], shared_grads[name]) for name in grads)


def test_the_result_is_laid_out_as_q_is() -> None:
    q, k, v = (torch.randn(2, 9, 3, 16).transpose(1, 2) for _ in "qkv")
    assert relu_attention(q, k, v, impl="cpu").stride() == q.stride()


@pytest.mark.parametrize(
    ("change", "runs"),
    [
        ({}, True),
        ({"dropout_p": 0.1}, False),
        ({"visibility": Visibility(mask=torch.ones(5, dtype=torch.bool))}, True),
        ({"return_sums": "entropy"}, False),
        ({"q": torch.zeros(1, 2, 0, 8)}, False),
        ({"q": torch.zeros(1, 2, 5, 8, dtype=torch.float64)}, False),
    ],
)
def test_what_runs_is_said_beforehand(change: dict[str, Any], runs: bool) -> None:
    given = {name: torch.zeros(1, 2, 5, 8) for name in "qkv"}
    shared = {"visibility": Visibility(), "scale": 1.0, "return_sums": "row_sum"}
    call = Call(**{**given, **shared, **change})
    assert make_plan(call, Rectified()).is_native is runs


def test_whoever_watches_operators_sees_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    q, k, v = (torch.randn(1, 2, 20, 8) for _ in "qkv")
    with FlopCounterMode(display=False) as counter:
        relu_attention(q, k, v, impl="cpu")
    assert counter.get_total_flops() == 2 * 2 * 2 * 20 * 20 * 8
