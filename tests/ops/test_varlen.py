"""Packed sequences against one dense call per sequence, outputs and gradients."""

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from reluformer import relu_attention, relu_attention_varlen
from reluformer.errors import UserError
from reluformer.ops import varlen
from tests.ops.rectified import error

# (queries, keys) of each sequence: odd, empty on one side or both, more queries than keys.
LENGTHS = [(5, 9), (0, 3), (5, 0), (0, 0), (1, 7), (13, 4), (19, 33)]
HEADS, KV_HEADS, WIDTH, REST = 4, 2, 16, 2

RULES: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window": 3},
    {"causal": True, "window": 4, "power": 2, "scale": 0.3},
    {"causal": True, "row_normalise": 0.1, "power": 4, "threshold": -0.5},
]
BACKENDS = ["reference", "cpu", "auto"]
if not torch.cuda.is_available():
    BACKENDS.append("triton")  # on the interpreter


def packed(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """q, k and v with NaN behind the last sequence, and the boundaries."""
    source = torch.Generator().manual_seed(3)
    ends = [torch.tensor([0, *accumulate(side)]) for side in zip(*LENGTHS, strict=True)]
    tensors = []
    for side, heads in ((0, HEADS), (1, KV_HEADS), (1, KV_HEADS)):
        rows = int(ends[side][-1])
        values = torch.randn(rows, heads, WIDTH, generator=source, dtype=torch.float64).to(dtype)
        rest = torch.full((REST, heads, WIDTH), torch.nan, dtype=dtype)
        tensors.append(torch.cat([values, rest]).requires_grad_())
    return tensors, ends


def sequence_by_sequence(
    tensors: list[Tensor], ends: list[Tensor], rules: dict[str, Any]
) -> list[Tensor]:
    """Output, row sums, entropies and counts of dense float64 calls, [N, H, ...]."""
    rows = tensors[0].shape[0]
    results = [torch.zeros(rows, HEADS, WIDTH, dtype=torch.float64)]
    results += [torch.zeros(rows, HEADS, dtype=torch.float64) for _ in range(3)]
    for (q0, q1), (k0, k1) in zip(*(pairwise(each.tolist()) for each in ends), strict=True):
        q, k, v = tensors[0][q0:q1], tensors[1][k0:k1], tensors[2][k0:k1]
        dense = relu_attention(
            *(t.double().transpose(0, 1)[None] for t in (q, k, v)),
            impl="reference", return_sums="entropy", **rules,
        )  # fmt: skip
        parts = (dense.output, dense.sums.row_sum, dense.sums.entropy, dense.sums.visible)
        results = [
            torch.cat([whole[:q0], part[0].transpose(0, 1), whole[q1:]])
            for whole, part in zip(results, parts, strict=True)
        ]
    return results


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize("rules", RULES, ids=str)
def test_matches_one_dense_call_per_sequence(
    rules: dict[str, Any], impl: str, dtype: torch.dtype
) -> None:
    if impl == "triton" and dtype == torch.float64:
        pytest.skip("the kernels take no float64")
    tensors, ends = packed(dtype)
    gamma = torch.tensor([0.7, 1.1, 1.3, 0.9], dtype=dtype, requires_grad=True)
    result = relu_attention_varlen(
        *tensors, *ends, 19, 33, gamma=gamma, impl=impl, return_sums="entropy", **rules
    )
    found = [result.output, *result.sums[:3]]
    wanted = sequence_by_sequence(tensors, ends, {**rules, "gamma": gamma})
    bound = 1e-12 if dtype == torch.float64 else 1e-4
    for actual, expected in zip(found, wanted, strict=True):
        assert error(actual, expected) < bound
    cotangents = [torch.randn_like(each) for each in wanted[:3]]
    leaves = [*tensors, gamma]
    grads = torch.autograd.grad(found[:3], leaves, [c.to(dtype) for c in cotangents])
    expected_grads = torch.autograd.grad(wanted[:3], leaves, cotangents)
    for actual, expected in zip(grads, expected_grads, strict=True):
        assert error(actual, expected) < bound
        assert not actual[actual.shape[0] - REST :].any() or actual.dim() == 1


def test_the_output_alone_without_sums() -> None:
    tensors, ends = packed(torch.float32)
    alone = relu_attention_varlen(*tensors, *ends, 19, 33, causal=True)
    both = relu_attention_varlen(*tensors, *ends, 19, 33, causal=True, return_sums="row_sum")
    assert torch.equal(alone, both.output) and both.sums.entropy is None
    assert not alone[-REST:].any()


@pytest.mark.parametrize("rules", RULES[:4], ids=str)
def test_counts_without_a_loop_are_those_of_the_dense_calls(rules: dict[str, Any]) -> None:
    """The packed kernel's counts come from the boundaries alone."""
    tensors, ends = packed(torch.float64)
    packing = varlen.Packing(*ends, 19, 33)
    visibility = varlen.Visibility(causal=rules.get("causal", False), window=rules.get("window"))
    call = varlen.Call(*tensors, visibility, 1.0, packing=packing)
    wanted = sequence_by_sequence(tensors, ends, rules)[3][:, 0]
    assert torch.equal(varlen._visible(call).double(), wanted)


@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_dropout_scales_the_weights_that_are_kept(impl: str) -> None:
    q, k = torch.ones(40, 1, 8), torch.ones(32, 1, 8)
    v = torch.eye(32)[:, None]
    ends_q, ends_k = torch.tensor([0, 15, 40]), torch.tensor([0, 12, 32])
    plain = relu_attention_varlen(q, k, v, ends_q, ends_k, 25, 20, impl=impl)
    dropped = relu_attention_varlen(q, k, v, ends_q, ends_k, 25, 20, dropout_p=0.4, impl=impl)
    is_kept = dropped > 0
    torch.testing.assert_close(dropped[is_kept], plain[is_kept] / 0.6)
    assert 0.5 < float(is_kept.sum() / (plain > 0).sum()) < 0.7


X, ENDS = torch.zeros(6, 2, 16), torch.tensor([0, 2, 6])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"q": torch.zeros(1, 6, 2, 16)}, r"q must be a tensor of shape \[N, heads, D\], got"),
        ({"q": [1]}, r"q must be a tensor of shape \[N, heads, D\], got list"),
        ({"k": torch.zeros(6, 2, 8)}, "k must match q in batch and width"),
        ({"v": torch.zeros(6, 2, 16).double()}, "q, k and v must share one dtype"),
        ({"cu_seq_q": torch.tensor([0.0, 6.0])}, "cu_seq_q must be an integer tensor"),
        ({"cu_seq_k": torch.tensor([0, 6])}, "must hold B \\+ 1 boundaries each"),
        ({"max_q": -1}, "max_q must be a whole number from 0 to 1073741824, got -1"),
        ({"power": 5}, "power must be 1, 2, 4 or 8, got 5"),
        ({"max_q": True}, "max_q must be a whole number from 0 to 1073741824, got True"),
        ({"max_k": 10**30}, "max_k must be a whole number from 0 to 1073741824, got 1000"),
        ({"max_q": 3}, "cu_seq_q must hold sequences of at most 3, got 4"),
        ({"cu_seq_q": torch.tensor([0, 5, 3])}, "cu_seq_q must ascend from 0 to at most"),
        ({"cu_seq_k": torch.tensor([0, 2, 99])}, "cu_seq_k must ascend from 0 to at most"),
        ({"cu_seq_k": torch.tensor([-1, 2, 6])}, "cu_seq_k must ascend from 0 to at most"),
        ({"window": 0}, "window must be a whole number of at least 1, got 0"),
        ({"impl": "sdpa"}, "impl must be one of triton, auto, cpu, reference, got 'sdpa'"),
        ({"cu_seq_k": torch.tensor([0, 4, 7]), "check": True}, "cu_seq_k must ascend from 0 to at"),
        ({"cu_seq_q": torch.tensor([1, 2, 6]), "check": True}, "cu_seq_q must ascend from 0"),
        ({"max_k": 3, "check": True}, "cu_seq_k must hold sequences of at most 3, got 4"),
    ],
    ids=str,
)
def test_refuses_in_one_sentence(change: dict[str, Any], text: str) -> None:
    given: dict[str, Any] = {
        "q": X, "k": X, "v": X, "cu_seq_q": ENDS, "cu_seq_k": ENDS, "max_q": 4, "max_k": 4,
    }  # fmt: skip
    with pytest.raises(UserError, match=text):
        relu_attention_varlen(**{**given, **change})


def test_a_named_backend_is_never_replaced() -> None:
    wide = torch.zeros(6, 2, 24)
    text = r"impl='triton' cannot run this relu_attention_varlen: head widths"
    if torch.cuda.is_available():
        wide = wide.cuda()
    with pytest.raises(UserError, match=text):
        relu_attention_varlen(wide, wide, wide, ENDS, ENDS, 4, 4, impl="triton")
