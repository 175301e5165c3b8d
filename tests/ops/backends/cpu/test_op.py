"""The CPU path against the formula: outputs, all gradients, tiles cut small or none."""

from typing import Any

import pytest
import torch

from reluformer.bench.timing import Clock
from reluformer.errors import UserError
from reluformer.ops.api import relu_attention
from reluformer.ops.backends.cpu import op, plan, tiles
from reluformer.ops.backends.cpu.native import library
from tests.ops.rectified import (
    CASES,
    Case,
    arguments,
    check,
    error,
    expected,
    found,
    huge,
    run_kernel,
    visible,
    weights,
)


@pytest.fixture(autouse=True, params=["tiles", "one piece", "compiled"])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Tiles that no length fits, or one for everything; or the compiled kernels, if they can."""
    if request.param == "compiled":
        request.getfixturevalue("compiled")
        return "compiled"
    monkeypatch.setattr(library, "load", lambda: None)
    monkeypatch.setattr(tiles, "ROWS", dict.fromkeys(tiles.ROWS, 8))
    monkeypatch.setattr(tiles, "SCORES", dict.fromkeys(tiles.SCORES, 8 * 16))
    if request.param == "tiles":
        monkeypatch.setattr(plan, "MANY_ROWS", 0)
        monkeypatch.setattr(plan, "SHORT", 0)
    return str(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_formula(case: Case, dtype: torch.dtype) -> None:
    bound = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3}[dtype]
    if dtype == torch.bfloat16:
        # Here it is a rounded score that is raised to the power.
        bound *= max(1.0, case.power / 2)
    check(op.attend, arguments(case, dtype, "cpu"), bound, 3 * bound)


@pytest.mark.parametrize("power", [1, 2])
def test_gradcheck(power: int) -> None:
    case = Case(
        "", heads=4, kv_heads=2, queries=9, keys=17, width=2, value_width=2, power=power,
        causal=True, gamma=True, threshold=(0.1, -0.2, 0.0, 0.3), statistics=2,
    )  # fmt: skip
    given = arguments(case, torch.float64, "cpu")

    def call(*leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        named = dict(zip(given.leaves, leaves, strict=True))
        options = {**given.options, "gamma": named["gamma"], "threshold": named["threshold"]}
        return run_kernel(op.attend, named["q"], named["k"], named["v"], options)

    assert torch.autograd.gradcheck(call, list(given.leaves.values()))


@pytest.mark.parametrize("power", [1, 4])
def test_dropout_is_the_same_forward_and_backward(power: int) -> None:
    case = Case("", queries=21, keys=32, value_width=32, power=power, statistics=2)
    given = arguments(case, torch.float64, "cpu")
    given.options["dropout_p"] = 0.4
    identity = torch.eye(32, dtype=torch.float64).expand(1, 2, 32, 32)
    torch.manual_seed(1)
    shown, _, _ = run_kernel(
        op.attend, given.leaves["q"], given.leaves["k"], identity, given.options
    )
    w = weights(given.leaves, given.options)
    kept = (shown > 0).double() / 0.6
    torch.testing.assert_close(shown, w * kept)
    torch.manual_seed(1)
    outputs, grads = found(op.attend, given)
    wanted, wanted_grads = expected(given, kept)
    torch.testing.assert_close(outputs, wanted)
    torch.testing.assert_close(grads, wanted_grads)


def test_high_powers_of_large_products_stay_in_range() -> None:
    given = huge(Case("", power=4, threshold=0.05), torch.float32, "cpu", 1e5)
    check(op.attend, given, 2e-6, 6e-6)


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0)])
def test_no_queries_or_no_keys(queries: int, keys: int) -> None:
    given = arguments(Case("", queries=queries, keys=keys, statistics=2), torch.float32, "cpu")
    outputs, grads = found(op.attend, given)
    assert all(not each.any() for each in (*outputs, *grads.values()))


def test_only_one_statistic_is_used() -> None:
    given = arguments(Case("", statistics=2, gamma=True), torch.float64, "cpu")
    q, k, v = (given.leaves[name] for name in "qkv")
    _, row_sum, _ = run_kernel(op.attend, q, k, v, given.options)
    grads = torch.autograd.grad(row_sum.sum(), (q, k, given.leaves["gamma"]))
    wanted = torch.autograd.grad(
        weights(given.leaves, given.options).sum(), (q, k, given.leaves["gamma"])
    )
    torch.testing.assert_close(grads, wanted)


@pytest.mark.parametrize("change", [{"power": 5}, {"scale": 0.0}])
def test_refuses_in_one_sentence(change: dict[str, Any]) -> None:
    given = arguments(CASES[0], torch.float32, "cpu")
    q, k, v = (given.leaves[name].detach() for name in "qkv")
    with pytest.raises(UserError, match=next(iter(change))):
        relu_attention(q, k, v, impl="cpu", **change)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("laid", ["by token", "by head", "with room"])
@pytest.mark.parametrize(
    "rules", [{}, {"key_lengths": (20, 37, 0)}, {"mask": (3, 1, 3, 37)}], ids=str
)
def test_reads_a_cache_where_it_lies(rules: dict[str, Any], laid: str, dtype: torch.dtype) -> None:
    case = Case("", batch=3, heads=4, queries=3, keys=37, statistics=1, **rules)
    given = arguments(case, dtype, "cpu", transposed=laid == "by token")
    wanted, _ = expected(given)
    q, k, v = (given.leaves[name].detach() for name in "qkv")
    if laid == "with room":
        k, v = (torch.nn.functional.pad(each, (0, 0, 0, 9))[:, :, :37] for each in (k, v))
    out, sums, logs = run_kernel(op.attend, q, k, v, given.options)
    bound = 2e-6 if dtype == torch.float32 else 8e-3
    assert error(out, wanted[0]) <= bound
    assert error(sums, wanted[1]) <= bound
    assert logs is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rules", [{"key_lengths": (5, 0)}, {"mask": (2, 1, 1, 9)}], ids=str)
def test_hidden_keys_may_hold_anything(rules: dict[str, Any], dtype: torch.dtype) -> None:
    given = arguments(Case("", batch=2, queries=3, keys=9, **rules), dtype, "cpu")
    q, k, v = (given.leaves[name].detach() for name in "qkv")
    out, _, _ = run_kernel(op.attend, q, k, v, given.options)
    seen = visible(given.options, (2, 2, 3, 9))[:, :, 0, :, None]
    for nonsense in (torch.nan, torch.inf):
        other, _, _ = run_kernel(op.attend, q, torch.where(seen, k, nonsense), v, given.options)
        assert torch.equal(other, out)


def test_memory_is_linear_in_the_length(size: str) -> None:
    if size == "one piece":
        return
    clock = Clock("cpu")

    def peak(n: int) -> float:
        given = arguments(Case("", queries=n, keys=n, causal=True), torch.float32, "cpu")
        return clock.peak(lambda: found(op.attend, given))

    assert peak(256) < 2.5 * peak(128)


def test_runs_on_request() -> None:
    q, k, v = (torch.randn(2, 4, 19, 16) for _ in "qkv")
    mask = torch.rand(2, 1, 19, 19) > 0.3
    options = {"causal": True, "gamma": torch.rand(4) + 1, "key_lengths": torch.tensor([19, 7])}
    for more in ({}, {"mask": mask}):
        ours = relu_attention(q, k, v, impl="cpu", **options, **more)
        wanted = relu_attention(q, k, v, impl="reference", **options, **more)
        torch.testing.assert_close(ours, wanted)
    with pytest.raises(UserError, match="bias"):
        relu_attention(q, k, v, impl="cpu", bias=torch.zeros(19))


def test_float64_stays_float64() -> None:
    q, k, v = (torch.randn(1, 4, 19, 16, dtype=torch.float64) for _ in "qkv")
    gamma = torch.rand(4, dtype=torch.float64) + 1
    ours, wanted = (relu_attention(q, k, v, impl=i, gamma=gamma) for i in ("cpu", "reference"))
    torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12)


def test_autocast_rounds_nothing() -> None:
    given = arguments(Case("", causal=True), torch.float32, "cpu")
    with torch.autocast("cpu", torch.bfloat16):
        check(op.attend, given, 2e-6, 6e-6)


def test_decoding_without_any_key_reads_nothing() -> None:
    q, none = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 0, 8)
    thresholds = torch.full((4,), -4.0)
    out = relu_attention(q, none, none, threshold=thresholds, row_normalise=1e-4, impl="cpu")
    assert out.shape == q.shape and not out.any()


@pytest.mark.parametrize("power", [4, 8])
@pytest.mark.parametrize("way", ["native", "torch"])
def test_high_powers_of_bfloat16_are_as_accurate_as_the_reference(
    power: int, way: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rounding of a score to bfloat16 would be multiplied by the power."""
    if way == "native":
        request.getfixturevalue("compiled")
    else:
        monkeypatch.setattr(library, "load", lambda: None)
    source = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(1, 2, 512, 64, generator=source).bfloat16() for _ in range(4))

    def run(impl: str, dtype: torch.dtype) -> list[torch.Tensor]:
        wide = torch.promote_types(dtype, torch.float32)
        threshold = torch.full((2,), -0.3, dtype=wide, requires_grad=True)
        leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        output = relu_attention(*leaves, causal=True, power=power, threshold=threshold, impl=impl)
        gradients = torch.autograd.grad(output, [*leaves, threshold], grad.to(dtype))
        return [t.double() for t in (output, *gradients)]

    exact = run("reference", torch.float64)
    for result, wanted in zip(run("cpu", torch.bfloat16), exact, strict=True):
        # Native kernels round the weights once.
        assert (result - wanted).norm() < 0.005 * wanted.norm()


@pytest.mark.parametrize("rules", [{}, {"causal": True}, {"key_lengths": torch.tensor([600, 130])}])
@pytest.mark.parametrize("row_normalise", [None, 1e-4])
@pytest.mark.parametrize("power", [1, 4])
def test_learned_numbers_in_bfloat16(
    power: int, row_normalise: float | None, rules: dict[str, Any], compiled: object
) -> None:
    """Their gradients are sums over all rows, in which rounded outputs do not cancel."""
    source = torch.Generator().manual_seed(1)
    q, grad = (torch.randn(2, 4, 150, 32, generator=source).bfloat16() for _ in range(2))
    k, v = (torch.randn(2, 2, 600, 32, generator=source).bfloat16() for _ in range(2))

    def run(impl: str, dtype: torch.dtype) -> list[torch.Tensor]:
        wide = torch.promote_types(dtype, torch.float32)
        gamma, threshold = (
            torch.full((4,), value, dtype=wide, requires_grad=True) for value in (1.3, -0.3)
        )
        leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        options = {"gamma": gamma, "threshold": threshold, "row_normalise": row_normalise}
        output = relu_attention(*leaves, power=power, impl=impl, **options, **rules)
        results = torch.autograd.grad(output, [gamma, threshold, *leaves], grad.to(dtype))
        return [t.double() for t in results]

    results, exact = run("cpu", torch.bfloat16), run("reference", torch.float64)
    for result, wanted in zip(results[:2], exact[:2], strict=True):
        assert (result - wanted).norm() < 1e-4 * wanted.norm()
    for result, wanted in zip(results[2:], exact[2:], strict=True):
        assert (result - wanted).norm() < 0.005 * wanted.norm()
