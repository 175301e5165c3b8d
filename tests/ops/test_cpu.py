"""The tiled CPU path against the formula: outputs, all gradients, tiles cut small."""

from typing import Any

import pytest
import torch

from reluformer.errors import UserError
from reluformer.ops import cpu
from reluformer.ops.api import relu_attention
from tests.ops.rectified import CASES, Case, arguments, check, error, expected, found, weights


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that no length fits."""
    monkeypatch.setattr(cpu, "ROWS", dict.fromkeys(cpu.ROWS, 8))
    monkeypatch.setattr(cpu, "SCORES", dict.fromkeys(cpu.SCORES, 8 * 16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if case.mask is None], ids=str)
def test_matches_the_formula(case: Case, dtype: torch.dtype) -> None:
    bound = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3}[dtype]
    check(cpu.rectified_attention, arguments(case, dtype, "cpu"), bound, 3 * bound)


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
        return cpu.rectified_attention(named["q"], named["k"], named["v"], **options)

    assert torch.autograd.gradcheck(call, list(given.leaves.values()))


def test_dropout_is_the_same_forward_and_backward() -> None:
    case = Case("", queries=21, keys=32, value_width=32, statistics=2)
    given = arguments(case, torch.float64, "cpu")
    given.options["dropout_p"] = 0.4
    identity = torch.eye(32, dtype=torch.float64).expand(1, 2, 32, 32)
    torch.manual_seed(1)
    shown, _, _ = cpu.rectified_attention(
        given.leaves["q"], given.leaves["k"], identity, **given.options
    )
    w = weights(given.leaves, given.options)
    kept = ((shown > 0) / 0.6).detach()
    torch.testing.assert_close(shown, w * kept)
    torch.manual_seed(1)
    outputs, grads = found(cpu.rectified_attention, given)
    wanted, wanted_grads = expected(given, kept)
    torch.testing.assert_close(outputs, wanted)
    torch.testing.assert_close(grads, wanted_grads)


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0)])
def test_no_queries_or_no_keys(queries: int, keys: int) -> None:
    given = arguments(Case("", queries=queries, keys=keys, statistics=2), torch.float32, "cpu")
    outputs, grads = found(cpu.rectified_attention, given)
    assert all(not each.any() for each in (*outputs, *grads.values()))


def test_only_one_statistic_is_used() -> None:
    given = arguments(Case("", statistics=2, gamma=True), torch.float64, "cpu")
    q, k, v = (given.leaves[name] for name in "qkv")
    _, row_sum, _ = cpu.rectified_attention(q, k, v, **given.options)
    grads = torch.autograd.grad(row_sum.sum(), (q, k, given.leaves["gamma"]))
    wanted = torch.autograd.grad(
        weights(given.leaves, given.options).sum(), (q, k, given.leaves["gamma"])
    )
    torch.testing.assert_close(grads, wanted)


@pytest.mark.parametrize("change", [{"power": 3}, {"scale": 0.0}, {"mask": torch.ones(1)}])
def test_refuses_in_one_sentence(change: dict[str, Any]) -> None:
    given = arguments(CASES[0], torch.float32, "cpu")
    q, k, v = (given.leaves[name] for name in "qkv")
    with pytest.raises(UserError, match=next(iter(change))):
        cpu.rectified_attention(q, k, v, **{**given.options, **change})


@pytest.mark.parametrize("lengths", [None, (20, 37, 0)])
def test_reads_a_large_cache_where_it_lies(
    lengths: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "LARGE", 1)
    case = Case("", batch=3, queries=1, keys=37, causal=True, key_lengths=lengths, statistics=1)
    given = arguments(case, torch.float32, "cpu")
    wanted, _ = expected(given)
    with torch.no_grad():
        out, sums, logs = cpu.rectified_attention(
            *(given.leaves[name] for name in "qkv"), **given.options
        )
    assert error(out, wanted[0]) <= 2e-6
    assert error(sums, wanted[1]) <= 2e-6
    assert logs is None


def test_runs_on_request() -> None:
    q, k, v = (torch.randn(2, 4, 19, 16) for _ in "qkv")
    options = {"causal": True, "gamma": torch.rand(4) + 1, "key_lengths": torch.tensor([19, 7])}
    ours = relu_attention(q, k, v, impl="cpu", **options)
    torch.testing.assert_close(ours, relu_attention(q, k, v, impl="reference", **options))
    with pytest.raises(UserError, match="mask"):
        relu_attention(q, k, v, impl="cpu", mask=torch.ones(19, 19, dtype=torch.bool))
