"""The product with ReLU as its epilogue against a product and a ReLU."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from reluformer.ops import relu_linear as module
from reluformer.ops.relu_linear import is_faster, relu_linear

Run = Callable[..., Tensor]
WAYS: dict[str, Run] = {
    "plain": relu_linear,
    "operator": torch.ops.reluformer.relu_linear.default,
}
every_way = pytest.mark.parametrize("way", WAYS)
with_bias = pytest.mark.parametrize("bias", [False, True])


def definition(x: Tensor, keys: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(x, keys, bias).relu()


def inputs(
    bias: bool, dtype: torch.dtype = torch.float64, sizes: tuple[int, int, int] = (5, 3, 7)
) -> list[Tensor | None]:
    tokens, width, slots = sizes
    shapes = ((tokens, width), (slots, width), (slots,))
    made = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    return [*made] if bias else [*made[:2], None]


def both(run: Run, given: list[Tensor | None]) -> list[Tensor]:
    """The output and the gradients of whatever wants one."""
    leaves = [each for each in given if each is not None and each.requires_grad]
    output = run(*given)
    probe = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
    return [output.detach(), *torch.autograd.grad(output, leaves, probe)]


@every_way
@with_bias
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_is_relu_of_linear(way: str, bias: bool, dtype: torch.dtype) -> None:
    given = inputs(bias, dtype)
    torch.testing.assert_close(both(WAYS[way], given), both(definition, given))
    with torch.no_grad():
        torch.testing.assert_close(WAYS[way](*given), definition(*given))


@given(st.tuples(st.integers(0, 5), st.integers(1, 5), st.integers(1, 5)), st.booleans())
def test_any_size_and_layout(sizes: tuple[int, int, int], bias: bool) -> None:
    x, keys, b = inputs(bias, sizes=sizes)
    assert x is not None and keys is not None
    twisted = [
        x.detach().t().contiguous().t().requires_grad_(),
        keys.detach().repeat(1, 2)[:, : keys.shape[1]].requires_grad_(),
        b,
    ]
    torch.testing.assert_close(both(relu_linear, twisted), both(definition, [x, keys, b]))


@every_way
@with_bias
def test_gradients_of_gradients(way: str, bias: bool) -> None:
    x, keys, b = inputs(bias, sizes=(2, 3, 4))
    leaves = (x, keys) if b is None else (x, keys, b)

    def run(*leaves: Tensor) -> Tensor:
        return WAYS[way](*leaves, *([] if bias else [None]))

    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(run, leaves)


@every_way
@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_computes_and_keeps_only_what_is_needed(way: str, wanted: int) -> None:
    given = inputs(True)
    for number, each in enumerate(given):
        assert each is not None
        each.requires_grad_(number == wanted)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        output = WAYS[way](*given)
    # The hidden values, and x for the keys or the keys for x.
    assert len(kept) == (1 if wanted == 2 else 2)
    products: list[Any] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            products.extend([func] if func is torch.ops.aten.mm.default else [])
            return func(*args, **(kwargs or {}))

    with Watch():
        output.sum().backward()
    assert len(products) == (0 if wanted == 2 else 1)


@with_bias
def test_operator_is_well_formed(bias: bool) -> None:
    given = tuple(inputs(bias, torch.float32))
    torch.library.opcheck(torch.ops.reluformer.relu_linear.default, given)


@with_bias
def test_compiled_without_a_graph_break(bias: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(relu_linear, fullgraph=True, backend="aot_eager")
    for tokens in (5, 6, 9):
        given = inputs(bias, sizes=(tokens, 3, 7))
        torch.testing.assert_close(both(compiled, given), both(relu_linear, given))


def test_a_compiler_sees_one_operator() -> None:
    seen: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch._dynamo.reset()
    torch.compile(relu_linear, fullgraph=True, backend=backend)(*inputs(True))
    assert seen == [torch.ops.reluformer.relu_linear.default]


@with_bias
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast_treats_it_like_linear(bias: bool, dtype: torch.dtype) -> None:
    given = inputs(bias, dtype, (6, 8, 16))
    with torch.autocast("cpu", torch.bfloat16):
        output, wanted = relu_linear(*given), definition(*given)
        compiled = torch.compile(relu_linear, fullgraph=True, backend="aot_eager")(*given)
    assert output.dtype == wanted.dtype == compiled.dtype
    assert output.dtype == (torch.bfloat16 if dtype == torch.float32 else dtype)
    torch.testing.assert_close(output, wanted)
    torch.testing.assert_close(compiled, wanted)
    leaves = [each for each in given if each is not None]
    for actual, expected in zip(
        *(torch.autograd.grad(each.sum(), leaves) for each in (output, wanted)), strict=True
    ):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


def test_wrong_types_are_refused_as_linear_refuses_them() -> None:
    x, keys, _ = inputs(False)
    assert x is not None and keys is not None
    with pytest.raises(RuntimeError):
        relu_linear(x, keys.float())


def test_pays_in_half_precision_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(2, 3)
    assert not is_faster(x.bfloat16())
    monkeypatch.setattr(module, "_on_gpu", lambda x: True)
    assert is_faster(x.bfloat16()) and is_faster(x.half())
    assert not is_faster(x) and not is_faster(x.double())
    with torch.autocast("cpu", torch.bfloat16):
        assert is_faster(x) and is_faster(x.half()) and not is_faster(x.double())
    asked = torch.func.vmap(partial(_noted, seen := []))(x.half())
    assert asked.shape == x.shape and seen == [False]


def _noted(seen: list[bool], x: Tensor) -> Tensor:
    seen.append(is_faster(x))
    return x
