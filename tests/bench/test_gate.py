"""Comparison with float64: correct kernels pass, wrong ones are refused, others are absent."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from reluformer.bench import gate
from reluformer.bench.cases import Case
from reluformer.bench.contestant import Contestant, Run
from reluformer.bench.contestants import contestants
from reluformer.bench.flex import flex_log_of_relu, flex_softmax, keep_graph
from reluformer.bench.rules import DEFAULT, as_in_models
from reluformer.model.config import AttentionConfig
from reluformer.ops import relu_attention

CASE = Case("dense", "cpu", "float32", 2, 4, 2, 40, 40, 16, causal=True)


def relu(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return (relu_attention(q, k, v, causal=True, impl="reference"),)


def verdict(run: Run, case: Case = CASE, kind: str = "relu") -> gate.Check:
    return gate.check(case, Contestant("injected", kind, run, case))


def test_every_implementation_passes_or_gives_a_reason() -> None:
    checks = {each.name: gate.check(CASE, each) for each in contestants(CASE).values()}
    right = ("relu cpu", "relu reference", "softmax sdpa", "SDPA-flash", "entmax15 reference")
    for name in (*right, DEFAULT):
        assert checks[name].passed, checks[name]
        assert {"out", "dq", "dk", "dv"} <= set(checks[name].errors)
    assert "hard dv" in checks["relu cpu"].errors
    assert "hard dv" not in checks["SDPA-flash"].errors
    for check in checks.values():
        assert check.passed or check.absent and "\n" not in check.absent
    assert not checks["SDPA-cuDNN"].passed


def wrong_scale(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return (relu(q, k, v)[0] * 1.001,)


def wrong_last_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    out = relu(q, k, v)[0]
    return (torch.cat([out[:, :-1], out[:, -1:] + 0.01], dim=1),)


def looks_ahead(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return (relu_attention(q, k, v, impl="reference"),)


def no_gradient_for_keys(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return (relu(q, k.detach() + 0 * k, v)[0],)


def not_a_number(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return (relu(q, k, v)[0] * float("nan"),)


def cancels(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    # Correct for dense weights, wrong for sparse weights and values with a mean.
    return (relu(q, k, v)[0] + 3e-6 * v.sum(dim=2, keepdim=True).repeat(1, 2, 1, 1),)


@pytest.mark.parametrize(
    ("run", "named"),
    [
        (wrong_scale, "error of"),
        (wrong_last_head, "error of hard out"),
        (looks_ahead, "error of"),
        (no_gradient_for_keys, "error of"),
        (not_a_number, "nan"),
        (cancels, "error of hard out"),
    ],
)
def test_a_wrong_kernel_is_refused(run: Run, named: str) -> None:
    found = verdict(run)
    assert not found.passed and found.refused is not None and named in found.refused
    assert found.errors


def test_every_power_matches_its_own_formula_only() -> None:
    configs = [AttentionConfig(power=power) for power in (2, 4, 8)]
    entrants = [as_in_models(f"power {each.power}", CASE, each) for each in configs]
    for entrant in entrants:
        assert gate.check(CASE, entrant).passed
    swapped = replace(entrants[0], run=entrants[1].run)
    assert not gate.check(CASE, swapped).passed


def test_powers_above_two_may_have_larger_errors() -> None:
    plain = Contestant("injected", "relu", relu, replace(CASE, dtype="bfloat16", device="cuda"))
    fourth = replace(plain, power=4)
    assert gate._verdict(plain, {"out": 4e-3}) is not None
    assert gate._verdict(fourth, {"out": 4e-3}) is None
    assert gate._verdict(fourth, {"out": 6e-3}) is not None


def test_a_correct_kernel_passes() -> None:
    assert verdict(relu).passed


def test_a_kernel_that_raises_is_absent_with_one_line() -> None:
    def broken(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        raise RuntimeError("no such kernel\nwith details")

    assert verdict(broken).absent == "no such kernel"


def test_decoding_is_checked_forward_only() -> None:
    case = Case("decode", "cpu", "float32", 2, 4, 2, 1, 33, 16)
    for name in ("relu cpu", "SDPA-flash"):
        found = gate.check(case, contestants(case)[name])
        assert found.passed and "dq" not in found.errors


@pytest.mark.parametrize("chunk", [1, 50, 1 << 20])
def test_the_formula_in_chunks_equals_the_whole_formula(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "_CHUNK_SCORES", chunk)
    window = replace(CASE, queries=9, keys=9)
    for options in ({}, {"window": 3}, {"key_lengths": torch.tensor([9, 4])}):
        given = [gate._corners(window, each) for each in window.inputs(0)]
        contestant = Contestant("x", "relu", relu, window, options=lambda b, h, o=options: dict(o))
        found = gate._formula(contestant, given, backward=True)
        *leaves, grad = (each.double() for each in given)
        for leaf in leaves:
            leaf.requires_grad_()
        out = relu_attention(*leaves, causal=True, impl="reference", **options)
        wanted = [out, *torch.autograd.grad(out, leaves, grad)]
        for mine, true in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, true.detach(), rtol=1e-12, atol=1e-12)


def test_every_feature_matches_float64() -> None:
    case = Case("features", "cpu", "float32", 2, 8, 8, 24, 24, 16)
    checks = {each.name: gate.check(case, each) for each in contestants(case).values()}
    for name, check in checks.items():
        # These exist for the Triton kernels only.
        triton_only = name.startswith("packed") or name == "row sums, one entropy in 8"
        assert check.passed or triton_only, check
    assert set(checks["row sums and entropy"].errors) >= {"row sums", "w log w", "dq"}


def test_kernels_that_compile_are_checked_by_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def threads(count: int) -> ThreadPoolExecutor:
        sizes.append(count)
        return ThreadPoolExecutor(count)

    def joined(case: Case) -> dict[str, Contestant]:
        found = contestants(case)
        return {
            name: replace(found[name], is_compiled=name != "SDPA-flash")
            for name in ("relu cpu", "SDPA-flash", "FlexAttention")
        }

    monkeypatch.setattr(gate, "_processes", threads)
    monkeypatch.setattr(gate, "contestants", joined)
    found = {each.name: each for each in gate.check_all([CASE], workers=3)}
    assert sizes == [3]
    assert found["relu cpu"].passed and found["SDPA-flash"].passed
    assert found["FlexAttention"].absent is not None


def test_a_fault_is_retried_in_a_fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "_processes", ThreadPoolExecutor)
    calls: list[str] = []

    def job(case: Case, name: str) -> gate.Check:
        calls.append(name)
        if name == "dies" or (name == "once" and calls.count("once") == 1):
            raise BrokenProcessPool
        if name == "faults":
            return gate.Check(case.name, name, absent="CUDA error: an illegal memory access")
        return gate.Check(case.name, name, absent="not here" if name == "absent" else None)

    names = ["dies", "once", "faults", "absent", "fine"]
    found = list(gate.in_workers(job, [(CASE, name) for name in names], 1))
    assert [each.name for each in found] == names
    assert [each.passed for each in found] == [False, True, False, False, True]
    assert [calls.count(name) for name in names] == [2, 2, 2, 1, 1]
    assert pickle.loads(pickle.dumps((gate._check_by_name, CASE, found)))[1:] == (CASE, found)


@pytest.mark.parametrize("causal", [False, True])
def test_the_log_of_relu_modification_is_refused_with_its_published_offset(
    causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.nn.attention import flex_attention

    # Run eagerly: compilation is slow, and there is no backward on a CPU.
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    case = Case("decode", "cpu", "float32", 1, 2, 2, 128, 128, 16, causal)
    softmax = verdict(flex_softmax(causal, "cpu", 128), case, "softmax")
    assert softmax.passed
    half = replace(case, dtype="bfloat16")
    trick = flex_log_of_relu(causal, "cpu", 128)
    assert verdict(trick, case).passed and verdict(trick, half).passed
    published = flex_log_of_relu(causal, "cpu", 128, offset=1.0)
    assert verdict(published, case).errors["out"] < 1e-5
    refused = verdict(published, half)
    assert refused.refused is not None and refused.errors["hard out"] > 0.1


@pytest.mark.parametrize("keep", [False, True])
def test_a_compiled_backward_is_repeated_in_a_thread_of_its_own(keep: bool) -> None:
    def products(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return (((q @ k).sin() @ v).exp() @ v,)

    compiled = torch.compile(products, backend="aot_eager")
    run = keep_graph(compiled) if keep else compiled
    leaves = [torch.randn(8, 8, requires_grad=True) for _ in range(3)]

    # The first backward is compiled as if it were the last, as the gate's is.
    first, second = run(*leaves)[0].sum(), run(*leaves)[0].sum()

    def backward() -> list[tuple[Tensor, ...]]:
        torch.autograd.grad(first, leaves)
        return [torch.autograd.grad(second, leaves, retain_graph=True) for _ in range(2)]

    with ThreadPoolExecutor(1) as thread:
        if keep:
            wanted = torch.autograd.grad(products(*leaves)[0].sum(), leaves)
            for found in thread.submit(backward).result():
                torch.testing.assert_close(found, wanted)
        else:
            with pytest.raises(RuntimeError, match="donated"):
                thread.submit(backward).result()


def test_only_relu_gradients_of_q_and_k_have_the_tolerance_for_slope_jumps() -> None:
    def refusal(kind: str, name: str, error: float) -> str | None:
        return gate._verdict(Contestant("injected", kind, relu, CASE), {name: error})

    assert refusal("relu", "dk", 5e-4) is None and refusal("relu", "hard dq", 5e-4) is None
    assert refusal("relu", "dq", 2e-3) is not None
    assert refusal("relu", "dv", 5e-4) is not None and refusal("softmax", "dk", 5e-4) is not None
