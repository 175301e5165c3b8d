"""Tensors on the wrong device, without dense storage or with lazy views never reach a kernel."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from reluformer import PagedCache, attention, decode_attention, relu_attention
from reluformer.errors import UserError
from reluformer.ops.backends.cpu.native import library
from reluformer.ops.varlen import relu_attention_varlen
from tests.ops.inputs import make

Q, K, V = make(dtype=torch.float32)
TENSORS = {
    "q": Q,
    "k": K,
    "v": V,
    "mask": torch.ones(3, 5, dtype=torch.bool),
    "bias": torch.zeros(3, 5),
    "key_lengths": torch.tensor([5, 4]),
    "gamma": torch.ones(4),
    "threshold": torch.zeros(4),
}
every_tensor = pytest.mark.parametrize("name", TENSORS)
every_impl = pytest.mark.parametrize("impl", ["auto", "cpu", "reference"])

pytestmark = pytest.mark.usefixtures("compiled")


def run(name: str, value: Tensor, **more: Any) -> Tensor:
    """relu_attention with one tensor replaced; optional tensors only if they are replaced."""
    arguments: dict[str, Any] = {"q": Q, "k": K, "v": V, name: value, **more}
    return relu_attention(**arguments)


@every_tensor
@every_impl
@pytest.mark.parametrize("warm", [False, True])
def test_a_tensor_on_another_device_is_refused(name: str, impl: str, warm: bool) -> None:
    if impl == "cpu" and name == "bias":
        pytest.skip("the CPU backend takes no bias")
    if warm:
        run(name, TENSORS[name], impl=impl)
    other = "k" if name == "q" else name
    with pytest.raises(UserError, match=rf"{other} must be on .* as q is, got a tensor on "):
        run(name, TENSORS[name].to("meta"), impl=impl)


@every_tensor
@every_impl
@pytest.mark.parametrize("layout", ["sparse", "mkldnn", "nested", "jagged"])
def test_only_dense_tensors_pass(name: str, impl: str, layout: str) -> None:
    tensor = TENSORS[name]
    if layout == "sparse":
        odd = tensor.to_sparse()
    elif layout == "mkldnn":
        if not tensor.is_floating_point():
            pytest.skip("MKL-DNN holds floating-point tensors only")
        odd = tensor.to_mkldnn()
    elif tensor.dim() < 2:
        pytest.skip("nested tensors have two dimensions")
    else:
        nested = torch.strided if layout == "nested" else torch.jagged
        odd = torch.nested.nested_tensor(list(tensor), layout=nested)
    with pytest.raises(UserError, match=rf"{name} must be a dense tensor, got "):
        run(name, odd, impl=impl)


def negated(tensor: Tensor) -> Tensor:
    """The same numbers, stored with the opposite sign."""
    result = torch.complex(torch.zeros_like(tensor), -tensor).conj().imag
    assert result.is_neg() and torch.equal(result, tensor)
    return result


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "gamma", "threshold"])
@every_impl
@pytest.mark.parametrize("warm", [False, True])
def test_lazy_negation_is_resolved(name: str, impl: str, warm: bool) -> None:
    if impl == "cpu" and name == "bias":
        pytest.skip("the CPU backend takes no bias")
    expected = run(name, TENSORS[name], impl=impl)
    if not warm:
        from reluformer.ops import signature

        signature.CHOICES.clear()
    leaf = TENSORS[name].clone().requires_grad_()
    result = run(name, negated(leaf), impl=impl)
    torch.testing.assert_close(result, expected)
    (slope,) = torch.autograd.grad(result.sum(), leaf)
    plain = TENSORS[name].clone().requires_grad_()
    (wanted,) = torch.autograd.grad(run(name, plain, impl=impl).sum(), plain)
    torch.testing.assert_close(slope, wanted)


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "threshold"])
@every_impl
def test_zero_tensors_without_memory_are_zeros(name: str, impl: str) -> None:
    if impl == "cpu" and name == "bias":
        pytest.skip("the CPU backend takes no bias")
    zeros = torch.zeros_like(TENSORS[name])
    lazy = torch._efficientzerotensor(zeros.shape, dtype=zeros.dtype)
    expected = run(name, zeros, impl=impl)
    for _ in range(2):
        torch.testing.assert_close(run(name, lazy, impl=impl), expected)


def test_numbers_as_tensors_and_parameters_pass() -> None:
    for name in ("gamma", "threshold"):
        value = torch.nn.Parameter(TENSORS[name])
        torch.testing.assert_close(run(name, value), run(name, TENSORS[name]))
        run(name, torch.tensor(0.5))


class Named(torch.Tensor):
    """A subclass without behaviour of its own."""


@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "gamma"])
@every_impl
def test_subclasses_pass(name: str, impl: str) -> None:
    tensor = TENSORS[name]
    torch.testing.assert_close(
        run(name, tensor.as_subclass(Named), impl=impl).as_subclass(Tensor),
        run(name, tensor, impl=impl),
    )


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_softmax_passes_the_gate(name: str) -> None:
    inputs = {"q": Q, "k": K, "v": V}
    with pytest.raises(UserError, match="must be on"):
        attention("softmax", **{**inputs, name: inputs[name].to("meta")})
    result = attention("softmax", **{**inputs, name: negated(inputs[name])})
    torch.testing.assert_close(result, attention("softmax", **inputs))


PACKED = {
    "q": torch.randn(6, 4, 8),
    "k": torch.randn(6, 2, 8),
    "v": torch.randn(6, 2, 8),
    "cu_seq_q": torch.tensor([0, 2, 6]),
    "cu_seq_k": torch.tensor([0, 4, 6]),
}


@pytest.mark.parametrize("name", [*PACKED, "gamma", "threshold"])
def test_packed_tensors_pass_the_same_gate(name: str) -> None:
    tensors = {"gamma": torch.ones(4), "threshold": torch.zeros(4), **PACKED}
    expected = relu_attention_varlen(**tensors, max_q=4, max_k=4)
    for odd in (tensors[name].to("meta"), tensors[name].to_sparse()):
        with pytest.raises(UserError, match="must be (on|a dense tensor)"):
            relu_attention_varlen(**{**tensors, name: odd}, max_q=4, max_k=4)
    if tensors[name].is_floating_point():
        lazy = {**tensors, name: negated(tensors[name])}
        torch.testing.assert_close(relu_attention_varlen(**lazy, max_q=4, max_k=4), expected)


def test_the_paged_cache_passes_the_same_gate() -> None:
    cache = PagedCache(1, 1, 8, pages=2)
    new = torch.randn(1, 1, 3, 8)
    for odd in (new.to("meta"), new.to_sparse()):
        with pytest.raises(UserError, match=r"keys must be (on|a dense tensor)"):
            cache.append(odd, new)
        with pytest.raises(UserError, match=r"values must be (on|a dense tensor)"):
            cache.append(new, odd)
    cache.append(negated(new), new)
    expected = relu_attention(new, new, new, causal=True)
    torch.testing.assert_close(decode_attention(negated(new), cache), expected)
    with pytest.raises(UserError, match=re.escape("gamma must be on cpu as q is")):
        decode_attention(new, cache, gamma=torch.ones(1, device="meta"))


def test_the_kernels_are_the_compiled_ones() -> None:
    assert library.load() is not None
