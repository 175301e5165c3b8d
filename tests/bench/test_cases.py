"""Cases: FLOPs, inputs and selection."""

import pytest
import torch

from reluformer.bench.cases import Case, plan
from reluformer.errors import UserError


def test_flops_and_bytes_follow_the_documentation() -> None:
    case = Case("dense", "cpu", "bfloat16", 2, 3, 3, 5, 7, 11)
    base = 4 * 2 * 3 * 5 * 7 * 11
    assert case.flops("forward") == case.flops("decode") == base
    assert case.flops("backward") == 2.5 * base and case.flops("both") == 3.5 * base
    causal = Case("dense", "cpu", "bfloat16", 2, 3, 3, 5, 7, 11, causal=True)
    assert causal.flops("forward") == base / 2
    assert case.cache_bytes == 2 * 2 * 3 * 7 * 11 * 2
    assert case.scores == 2 * 3 * 5 * 7


def test_inputs_are_reproducible_views_of_tokens() -> None:
    case = Case("dense", "cpu", "bfloat16", 2, 4, 2, 5, 7, 16)
    q, k, v, grad = case.inputs(seed=3)
    assert q.shape == grad.shape == (2, 4, 5, 16) and k.shape == v.shape == (2, 2, 7, 16)
    assert q.dtype == torch.bfloat16 and q.transpose(1, 2).is_contiguous()
    again = case.inputs(seed=3)
    assert all(map(torch.equal, (q, k, v, grad), again))
    assert not torch.equal(q, case.inputs(seed=4)[0])


@pytest.mark.parametrize("width", [16, 64, 128])
def test_the_hard_regime_is_sparse_with_values_around_one(width: int) -> None:
    q, k, v, _ = Case("dense", "cpu", "float32", 1, 2, 2, 400, 400, width).inputs(0, hard=True)
    share = float((q @ k.mT > 0).float().mean())
    assert 3e-4 < share < 2e-3
    assert abs(float(v.mean()) - 1) < 0.05


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_plans_have_distinct_names_and_every_pass(device: str) -> None:
    chosen = plan(device)
    names = [case.name for case in chosen.cases]
    assert len(set(names)) == len(names)
    assert {mode for case in chosen.cases for mode in case.modes} == {
        "forward", "backward", "both", "decode",
    }  # fmt: skip
    assert chosen.rounds >= 10
    assert any(case.group == "features" for case in chosen.cases)


def test_selection_by_part_or_pattern() -> None:
    chosen = plan("cuda")
    assert {case.width for case in chosen.selected(["d 64,"]).cases} == {64}
    some = chosen.selected(["*causal*n 4096*", "decode"]).cases
    assert {case.group for case in some} == {"dense", "decode"}
    assert all(case.group == "decode" or (case.causal and case.keys == 4096) for case in some)
    assert chosen.selected([]) is chosen
    with pytest.raises(UserError, match="only must match a case, such as .*; got nonsense"):
        chosen.selected(["nonsense"])


def test_dtypes() -> None:
    assert {case.dtype for case in plan("cpu").cases} == {"float32", "bfloat16"}
    assert {case.dtype for case in plan("cuda", ("float16",)).cases} == {"float16"}
    quick = plan("cpu", ("float32", "bfloat16", "float32"), quick=True).cases
    assert {case.dtype for case in quick} == {"float32", "bfloat16"}
    assert len({case.name for case in quick}) == len(quick)
    with pytest.raises(UserError, match="dtype must be one of bfloat16, float16, float32"):
        plan("cpu", ("float8",))
