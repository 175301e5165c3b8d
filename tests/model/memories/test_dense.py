"""The ReLU memory with the fused product: when it is used, and agreement with the reference."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from reluformer.errors import UserError
from reluformer.model.memories import dense
from reluformer.model.memories.dense import AllSlots
from reluformer.model.memory import KeyValueMemory
from reluformer.ops import relu_linear as module
from tests.model.memories.kinds import KINDS, make, takes_bias

with_bias = pytest.mark.parametrize("bias", [False, True])


def needs_gpu(test: Any) -> Any:
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    return pytest.mark.gpu(skip(test))


@contextmanager
def as_on_gpu(yes: bool = True) -> Iterator[Any]:
    """Memories that take this machine for a GPU; gives a spy on the operator."""
    spy = patch.object(dense, "relu_linear", side_effect=module.relu_linear)
    with patch.object(module, "_on_gpu", lambda x: yes), spy as called:
        yield called


def both(memory: KeyValueMemory, x: Tensor, **autocast: Any) -> list[Tensor]:
    """Output and all gradients."""
    context = torch.autocast(x.device.type, **autocast) if autocast else nullcontext()
    with context:
        output = memory(x)
    probe = torch.linspace(-1, 1, output.numel(), device=x.device).view(output.shape)
    leaves = [x, *memory.parameters()]
    return [output.detach(), *torch.autograd.grad((output * probe.to(output.dtype)).sum(), leaves)]


def exact(memory: KeyValueMemory, x: Tensor) -> list[Tensor]:
    """`both` of the definition in float64."""
    twin = copy.deepcopy(memory).cpu().double()
    with as_on_gpu(False):
        return both(twin, x.detach().cpu().double().requires_grad_())


def assert_near(found: list[Tensor], wanted: list[Tensor], bound: float = 1e-2) -> None:
    for actual, expected in zip(found, wanted, strict=True):
        assert (actual.cpu().double() - expected).norm() <= bound * expected.norm()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_only_relu_in_half_precision_uses_the_fused_operator(kind: str, dtype: torch.dtype) -> None:
    memory = make(kind, dtype=dtype, bias=takes_bias(kind))
    x = torch.randn(5, 6, dtype=dtype)
    with as_on_gpu() as called:
        memory(x)
    assert called.called == (kind == "relu" and dtype in (torch.bfloat16, torch.float16))


@pytest.mark.parametrize(
    ("dtype", "autocast", "taken"),
    [
        (torch.float32, torch.bfloat16, True),
        (torch.float32, torch.float16, True),
        (torch.bfloat16, torch.bfloat16, True),
        (torch.float64, torch.bfloat16, False),
    ],
)
def test_autocast_chooses_the_dtype_as_for_linear(
    dtype: torch.dtype, autocast: torch.dtype, taken: bool
) -> None:
    memory, x = make("relu", dtype=dtype), torch.randn(5, 6, dtype=dtype)
    with torch.autocast("cpu", autocast):
        with as_on_gpu() as called:
            found = memory(x)
        assert called.called == taken
        wanted = memory(x)
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted)


def test_the_reference_runs_with_weights_dropout_or_gates() -> None:
    memory = make("relu", dtype=torch.bfloat16, dropout=0.5)
    x = torch.randn(5, 6).bfloat16()
    with as_on_gpu() as called:
        memory(x)
        result = memory.eval()(x, return_weights=True)
        torch.func.vmap(memory)(x)
        assert not called.called
        torch.testing.assert_close(memory(x), result.output)
        assert called.call_count == 1
        copy.deepcopy(memory)(x)
        assert called.call_count == 2
    with as_on_gpu(False) as called:
        memory(x)
    assert not called.called


def test_forward_mode_gradients_use_the_reference() -> None:
    memory = make("relu", dtype=torch.bfloat16)
    x, step = torch.randn(2, 5, 6).bfloat16()
    with as_on_gpu() as called, forward_ad.dual_level():
        found = forward_ad.unpack_dual(memory(forward_ad.make_dual(x, step))).tangent
    assert not called.called
    torch.testing.assert_close(found, torch.func.jvp(memory, (x,), (step,))[1])


@with_bias
def test_half_precision_agrees_with_float64(bias: bool) -> None:
    memory = make("relu", 32, 64, torch.bfloat16, bias=bias)
    x = torch.randn(2, 25, 32).bfloat16().requires_grad_()
    with as_on_gpu() as called:
        found = both(memory, x)
    assert called.called and all(each.dtype == torch.bfloat16 for each in found)
    assert_near(found, exact(memory, x))


@with_bias
def test_autocast_agrees_with_float64(bias: bool) -> None:
    # Values that bfloat16 represents exactly, because rounding would change signs of scores.
    memory = make("relu", 32, 64, torch.bfloat16, bias=bias).float()
    x = torch.randn(50, 32).bfloat16().float().requires_grad_()
    with as_on_gpu() as called:
        found = both(memory, x, dtype=torch.bfloat16)
    assert called.called and all(each.dtype == torch.float32 for each in found[1:])
    assert_near(found, exact(memory, x))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", [k for k in KINDS if make(k).selector == AllSlots()])
def test_compiles_without_graph_breaks(kind: str, autocast: bool) -> None:
    memory = make(kind, dtype=torch.float32 if autocast else torch.bfloat16, bias=True)
    x = torch.randn(5, 6, dtype=memory.keys.dtype, requires_grad=True)
    options = {"dtype": torch.bfloat16} if autocast else {}
    torch._dynamo.reset()
    with patch.object(module, "_on_gpu", lambda x: True):
        compiled = torch.compile(memory, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(both(compiled, x, **options), both(memory, x, **options))


def test_a_memory_without_queries() -> None:
    memory, x = make("relu", dtype=torch.bfloat16), torch.empty(0, 6).bfloat16().requires_grad_()
    with as_on_gpu() as called:
        found = both(memory, x)
    assert called.called and found[0].shape == (0, 6) and not found[2].any()


@needs_gpu
@with_bias
@pytest.mark.parametrize("tokens", [1, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_agrees_with_float64_on_the_device(bias: bool, tokens: int, dtype: torch.dtype) -> None:
    memory = make("relu", 128, 512, dtype, bias=bias).cuda()
    x = torch.randn(tokens, 128, dtype=dtype, device="cuda", requires_grad=True)
    with patch.object(dense, "relu_linear", side_effect=module.relu_linear) as called:
        found = both(memory, x)
    assert called.called
    assert_near(found, exact(memory, x))


@needs_gpu
@pytest.mark.parametrize("autocast", [False, True])
def test_forward_and_backward_can_be_captured_in_a_cuda_graph(autocast: bool) -> None:
    # The test suite fills memory with NaN in a mode of torch that graphs cannot capture.
    torch.use_deterministic_algorithms(False)
    memory = make("relu", 128, 512, torch.float32 if autocast else torch.bfloat16).cuda()
    x = torch.randn(256, 128, device="cuda", dtype=memory.keys.dtype, requires_grad=True)
    options = {"dtype": torch.bfloat16, "cache_enabled": False} if autocast else {}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            both(memory, x, **options)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = both(memory, x, **options)
    for _ in range(2):
        with torch.no_grad():
            x.normal_()
            memory.keys.mul_(1.5)
        graph.replay()
        assert_near(found, [each.cpu().double() for each in both(memory, x, **options)], 1e-3)


def test_a_temperature_divides_the_scores() -> None:
    torch.manual_seed(0)
    memory = KeyValueMemory(6, 10, "softmax", temperature=4.0)
    x = torch.randn(3, 6)
    result = memory(x, return_weights=True)
    torch.testing.assert_close(result.weights, (x @ memory.keys.T / 4).softmax(dim=-1))
    relu = KeyValueMemory(6, 10, "relu", temperature=2.0)
    torch.testing.assert_close(relu(x), (x @ relu.keys.T / 2).relu() @ relu.values)
    with pytest.raises(UserError, match="temperature must be greater than 0, got 0"):
        KeyValueMemory(6, 10, "softmax", temperature=0.0)
