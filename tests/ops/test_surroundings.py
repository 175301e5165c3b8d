"""Calls give the same whatever is around them: defaults of torch, hooks, changed inputs."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import reluformer
from tests.ops.inputs import assert_same


@pytest.fixture
def restored() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


def trained(dtype: torch.dtype, **arguments: Any) -> list[Tensor]:
    """Row sums and gradients of a call that the CPU kernels run."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 2, 130, 16, generator=generator, dtype=torch.float32, device="cpu")
    gamma = torch.full((2,), 1.5, dtype=torch.float32, device="cpu", requires_grad=True)
    x = q.to(dtype).requires_grad_()
    result = reluformer.attention(
        "normalised_relu", x, x, x, gamma=gamma, threshold=-8.0, return_sums="row_sum", **arguments
    )
    (result.output.float().square().sum() + result.sums.row_sum.sum()).backward()
    return [t for t in (result.sums.row_sum, x.grad, gamma.grad) if t is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16, "meta"])
def test_defaults_of_torch_change_nothing(default: Any, dtype: torch.dtype, restored: None) -> None:
    lengths = torch.tensor([100])
    expected = trained(dtype) + trained(dtype, key_lengths=lengths)
    if default == "meta":
        torch.set_default_device(default)
    else:
        torch.set_default_dtype(default)
    for found, right in zip(
        trained(dtype) + trained(dtype, key_lengths=lengths), expected, strict=True
    ):
        assert_same(found, right)


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_lengths_that_change_before_the_backward_pass(impl: str) -> None:
    x, gradients = torch.randn(1, 2, 6, 8), []
    for change in (0, 4):
        q, lengths = x.clone().requires_grad_(), torch.tensor([2])
        output = reluformer.relu_attention(q, x, x, key_lengths=lengths, impl=impl)
        lengths += change
        output.sum().backward()
        gradients.append(q.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32])
def test_narrow_lengths_of_long_rows(dtype: torch.dtype) -> None:
    q = torch.randn(2, 1, 300, 4)
    lengths = torch.tensor([5, 100])
    for arguments in ({}, {"causal": True}, {"window": 9}):
        expected = reluformer.relu_attention(q, q, q, key_lengths=lengths, **arguments)
        found = reluformer.relu_attention(q, q, q, key_lengths=lengths.to(dtype), **arguments)
        assert_same(found, expected)


@pytest.mark.parametrize("create_graph", [False, True])
def test_hooks_of_a_softmax_output(create_graph: bool) -> None:
    x, gradients = torch.randn(1, 2, 5, 8), []
    for impl in ("sdpa", "reference"):
        q = x.clone().requires_grad_()
        output = reluformer.attention("softmax", q, x, x, impl=impl)
        output.register_hook(lambda gradient: 2 * gradient)
        total = output.square().sum()
        gradients += torch.autograd.grad(total, q, create_graph=create_graph)
    torch.testing.assert_close(*gradients)


def test_a_differentiated_gradient_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from reluformer.ops.backends import sdpa

    branches: list[Any] = []
    create = sdpa._Branch.__init__

    def remember(self: Any, *arguments: Any) -> None:
        create(self, *arguments)
        branches.append(self)

    monkeypatch.setattr(sdpa._Branch, "__init__", remember)
    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    output = reluformer.attention("softmax", q, q, q, impl="sdpa")
    torch.autograd.grad(output.sum(), q, create_graph=True)
    assert len(branches) == 1 and branches[0].gradient is None


@pytest.mark.parametrize("name", ["sparsemax", "entmax15", "entmax"])
def test_second_derivatives_of_sparse_attentions(name: str) -> None:
    q = torch.randn(1, 1, 3, 4, dtype=torch.float64)
    assert torch.autograd.gradgradcheck(
        lambda x: reluformer.attention(name, x, q, q), (q.clone().requires_grad_(),)
    )


@pytest.mark.parametrize("name", ["softmax", "relu"])
def test_parameters_are_tensors(name: str) -> None:
    x = torch.randn(1, 1, 4, 8)
    value = x.clone()
    value[:, :, 3] = torch.nan
    found = reluformer.attention(name, torch.nn.Parameter(x), x, value, causal=True)
    assert bool(found[:, :, :3].isfinite().all())
    parameter = torch.nn.Parameter(x)
    output = reluformer.attention(name, parameter, parameter, parameter)
    (gradient,) = torch.autograd.grad(output.square().sum(), parameter, create_graph=True)
    gradient.sum().backward()


@pytest.mark.parametrize("name", ["relu", "normalised_relu", "softmax"])
def test_batched_gradients(name: str) -> None:
    x = torch.randn(1, 2, 5, 8)
    q = x.clone().requires_grad_()
    output = reluformer.attention(name, q, x, x)
    seeds = torch.randn(3, *output.shape)
    batched = torch.autograd.grad(output, q, seeds, is_grads_batched=True, retain_graph=True)[0]
    for found, seed in zip(batched, seeds, strict=True):
        expected = torch.autograd.grad(output, q, seed, retain_graph=True)[0]
        torch.testing.assert_close(found, expected)


def test_a_hidden_key_that_is_nan_has_no_gradient_by_cosine() -> None:
    x = torch.randn(1, 1, 4, 8)
    k = x.clone()
    k[:, :, 3] = torch.nan
    k.requires_grad_()
    lengths = torch.tensor([3])
    reluformer.attention("cosine_relu", x, k, x, key_lengths=lengths).sum().backward()
    assert k.grad is not None and bool(k.grad.isfinite().all())
