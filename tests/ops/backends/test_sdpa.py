"""Softmax: our reference against torch's kernels, and torch's kernels behind our arguments."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from reluformer import attention
from reluformer.errors import UserError
from reluformer.ops.call import AttentionResult
from tests.ops.inputs import assert_same, gradients, make

RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 3},
    "two-sided window": {"window": 2},
    "lengths": {"key_lengths": torch.tensor([4, 0])},
    "causal lengths": {"causal": True, "key_lengths": torch.tensor([6, 2])},
    "mask": {"mask": torch.arange(7) % 3 > 0},
    "scale": {"scale": 0.7},
    "bias": {"bias": torch.linspace(-2, 2, 7)},
    "bias and mask": {"bias": torch.linspace(-2, 2, 7), "mask": torch.arange(7) < 3},
    "bias and causal": {"bias": torch.ones(4, 1, 1), "causal": True},
    "nothing": {"mask": torch.tensor(False)},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [7, 3], ids=["square", "last rows"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_sdpa_agrees_with_the_reference(kv_heads: int, rows: int, dtype: torch.dtype) -> None:
    q, k, v = make(kv_heads=kv_heads, rows=rows, keys=7, dtype=dtype, requires_grad=True)
    tolerance = 2e-5 if dtype is torch.float32 else 1e-9
    for label, rules in RULES.items():
        found = [attention("softmax", q, k, v, impl=i, **rules) for i in ("sdpa", "reference")]
        pairs = [found, *zip(*(gradients(output, [q, k, v]) for output in found), strict=True)]
        for one, other in pairs:
            assert torch.allclose(one, other, rtol=0, atol=tolerance), label


def test_the_reference_is_torchs_softmax() -> None:
    q, k, v = make(kv_heads=4, rows=6, keys=6, requires_grad=True)
    mask = torch.rand(2, 1, 6, 6) > 0.3
    mask[..., 0] = True
    ours = attention("softmax", q, k, v, mask=mask, impl="reference")
    torchs = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(ours, torchs, rtol=0, atol=1e-6)
    for one, other in zip(gradients(ours, [q, k, v]), gradients(torchs, [q, k, v]), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_bias_gets_a_gradient() -> None:
    q, k, v = make()
    bias = torch.randn(4, 3, 5, dtype=q.dtype, requires_grad=True)
    mask = torch.rand(3, 5) > 0.3
    found = [
        gradients(attention("softmax", q, k, v, bias=bias, mask=mask, impl=impl), [bias])[0]
        for impl in ("sdpa", "reference")
    ]
    torch.testing.assert_close(*found)
    assert not found[0][:, ~mask].any()


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_compiled_calls_of_changing_lengths(kv_heads: int, dynamic: bool | None) -> None:
    torch.compiler.reset()
    compiled = torch.compile(attention, backend="eager", dynamic=dynamic, fullgraph=True)
    for rows, keys in ((5, 5), (6, 6), (3, 7), (4, 9), (8, 8)):
        q, k, v = make(kv_heads=kv_heads, rows=rows, keys=keys)
        found = compiled("softmax", q, k, v, causal=True, impl="sdpa")
        torch.testing.assert_close(found, attention("softmax", q, k, v, causal=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_answers_in_kind(dtype: torch.dtype) -> None:
    q, k, v = make(dtype=dtype)
    bias = torch.linspace(-1, 1, 5)
    for rules in ({}, {"causal": True}, {"bias": bias}):
        found = attention("softmax", q, k, v, impl="sdpa", **rules)
        exact = attention("softmax", q.double(), k.double(), v.double(), impl="reference", **rules)
        assert found.dtype is dtype
        torch.testing.assert_close(found.double(), exact, rtol=0.02, atol=0.02)


def test_softmax_takes_torchs_kernels_by_itself_unless_extras_are_asked_for() -> None:
    q, k, v = make(dtype=torch.float32)
    sdpa, plain = (attention("softmax", q, k, v, impl=impl) for impl in ("sdpa", "auto"))
    assert_same(plain, sdpa)
    extras = attention("softmax", q, k, v, return_weights=True)
    assert isinstance(extras, AttentionResult) and extras.stats is None
    torch.testing.assert_close(extras.output, sdpa)


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("relu", {}, "torch's fused kernels compute softmax only"),
        ("gated", {}, "torch's fused kernels compute softmax only"),
        ("softmax", {"return_weights": True}, "return neither weights nor statistics"),
        ("softmax", {"return_stats": True}, "return neither weights nor statistics"),
    ],
)
def test_an_explicit_request_that_cannot_run_is_refused(
    name: str, arguments: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UserError, match=rf"impl='sdpa' cannot run this {name} .*{reason}"):
        attention(name, *make(), impl="sdpa", **arguments)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("searching", [False, True])
def test_search_keeps_away_from_kernels_with_plans(
    searching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchs, seen = functional.scaled_dot_product_attention, []

    def spy(*args: Any, **options: Any) -> torch.Tensor:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return torchs(*args, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", spy)
    q, k, v = (each.cuda().bfloat16() for each in make(rows=1, keys=9))
    with torch.inference_mode(searching):
        found = attention("softmax", q, k, v, key_lengths=torch.tensor([9, 4]).cuda(), impl="sdpa")
    assert seen == [not searching]
    wanted = attention("softmax", q.cpu().float(), k.cpu().float(), v.cpu().float(),
                       key_lengths=torch.tensor([9, 4]), impl="reference")  # fmt: skip
    assert torch.allclose(found.cpu().float(), wanted, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_biases_of_minus_infinity_on_a_gpu(dtype: torch.dtype) -> None:
    bias = torch.linspace(-1, 1, 16 * 24).view(16, 24)
    bias[:, ::3] = bias[5] = -torch.inf
    found = []
    for impl, device in (("sdpa", "cuda"), ("reference", "cpu")):
        q, k, v = (
            each.to(device, dtype).requires_grad_() for each in make(rows=16, keys=24, dtype=dtype)
        )
        shift = bias.to(device, dtype).requires_grad_()
        output = attention("softmax", q, k, v, bias=shift, impl=impl)
        assert not output[:, :, 5].any()
        found.append([output, *gradients(output.cpu(), [q, k, v, shift])])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=3e-2, atol=5e-2)
