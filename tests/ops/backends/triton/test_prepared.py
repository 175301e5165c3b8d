"""Repeated calls skip the preparation, and only where nothing but values and addresses changed."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from reluformer import relu_attention
from reluformer.ops import signature
from reluformer.ops.backends.triton import prepared, run_backward, run_forward, tuning

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off")

# The first call prepares the forward pass, the second one the backward pass.
TWO_CALLS = ["forward", "backward", "backward"]
SHAPE = (2, 2, 20, 16)
NORMALISED = {"power": 4, "row_normalise": 0.1, "threshold": torch.full((2,), -1.0)}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True, "gamma": torch.tensor([1.0, 2.0])},
    NORMALISED,
    {"key_lengths": torch.tensor([20, 7]), "gamma": 2.0, "return_sums": "row_sum"},
]


def inputs(shape: tuple[int, ...] = SHAPE, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in "qkv"]


def gradients(
    impl: str, qkv: list[Tensor], options: dict[str, Any], grad: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """The output and the gradients of q, k, v and of tensors of floats in the options."""
    leaves = [tensor.detach().requires_grad_() for tensor in qkv]
    bound = dict(options)
    for name in ("gamma", "threshold"):
        if isinstance(options.get(name), Tensor):
            bound[name] = options[name].detach().clone().requires_grad_()
            leaves.append(bound[name])
    result = relu_attention(*leaves[:3], impl=impl, **bound)
    out = result if isinstance(result, Tensor) else result.output
    return [out, *torch.autograd.grad(out, leaves, grad(out))]


def compare(
    qkv: list[Tensor],
    options: dict[str, Any],
    grad: Callable[[Tensor], Tensor] = torch.cos,
) -> None:
    """The Triton kernels give the results of the reference."""
    actual = gradients("triton", qkv, options, grad)
    expected = gradients("reference", qkv, options, grad)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)


@pytest.fixture
def general(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the passes that went the general way."""
    names: list[str] = []

    def spy_on(module: Any, name: str) -> None:
        original = getattr(module, name)

        def spy(*args: Any) -> Any:
            names.append(name)
            return original(*args)

        monkeypatch.setattr(module, name, spy)

    spy_on(run_forward, "forward")
    spy_on(run_backward, "backward")
    return names


@pytest.mark.parametrize("one_pass", [False, True], ids=["two kernels", "one kernel"])
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "gamma", "normalised", "lengths"])
def test_a_repeated_call_is_prepared_and_uses_the_new_values(
    general: list[str], options: dict[str, Any], one_pass: bool
) -> None:
    with tuning.override(one_pass=one_pass):
        for seed in range(4):
            compare(inputs(seed=seed), options)
    assert general == TWO_CALLS


def test_without_gradients() -> None:
    q, k, v = inputs()
    for _ in range(3):
        out = relu_attention(q, k, v, impl="triton")
        assert not out.requires_grad
    torch.testing.assert_close(out, relu_attention(q, k, v, impl="reference"))


@pytest.mark.parametrize("first", [False, True])
def test_which_inputs_require_gradients_may_change(first: bool) -> None:
    q, k, v = inputs()
    for needs in (first, not first, first):
        threshold = torch.full((2,), -1.0, requires_grad=needs)
        gamma = torch.full((2,), 2.0, requires_grad=not needs)
        leaf = k.clone().requires_grad_()
        both = []
        for impl in ("triton", "reference"):
            out = relu_attention(q, leaf, v, impl=impl, gamma=gamma, threshold=threshold)
            both.append(torch.autograd.grad(out.cos().sum(), [leaf, threshold if needs else gamma]))
        for one, other in zip(*both, strict=True):
            torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)


def stored_by_token(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def misaligned(tensor: Tensor) -> Tensor:
    room = torch.empty(tensor.numel() + 1)
    return room[1:].view(tensor.shape).copy_(tensor)


def in_a_wider_tensor(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor], dim=-1)[..., : tensor.shape[-1]]


@pytest.mark.parametrize("options", [{}, NORMALISED], ids=["plain", "normalised"])
@pytest.mark.parametrize("change", [stored_by_token, misaligned, in_a_wider_tensor])
@pytest.mark.parametrize("position", [0, 2])
def test_another_layout_of_an_input(
    change: Callable[[Tensor], Tensor], position: int, options: dict[str, Any]
) -> None:
    for changed in (False, True, False, True):
        qkv = inputs()
        if changed:
            qkv[position] = change(qkv[position])
        compare(qkv, options)


@pytest.mark.parametrize("options", [{}, NORMALISED], ids=["plain", "normalised"])
def test_misaligned_calls_are_planned_once(
    options: dict[str, Any], general: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def call() -> None:
        compare([misaligned(tensor) for tensor in inputs()], options)

    call()
    monkeypatch.setattr(run_forward, "_portable_launch", None)
    monkeypatch.setattr(run_backward.backward_launches, "prepare", None)
    call()
    # Only aligned calls are prepared.
    assert general == ["forward", "backward"] * 2


@pytest.mark.parametrize("options", [{}, NORMALISED], ids=["plain", "normalised"])
@pytest.mark.parametrize(
    "grad",
    [
        stored_by_token,
        misaligned,
        lambda out: torch.ones(()).expand(out.shape),
        lambda out: out.transpose(2, 3).contiguous().transpose(2, 3),
    ],
    ids=["stored by token", "misaligned", "expanded", "strided"],
)
def test_another_layout_of_the_gradient(
    grad: Callable[[Tensor], Tensor], options: dict[str, Any]
) -> None:
    for function in (torch.clone, grad, torch.clone, grad):
        compare(inputs(), options, lambda out, f=function: f(out.detach()))  # type: ignore[misc]


@pytest.fixture
def precision() -> Iterator[None]:
    """Restores the precision of matrix products."""
    before = torch.backends.cuda.matmul.fp32_precision
    yield
    torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.usefixtures("precision")
def test_forced_tiles_and_precision_are_not_ignored(general: list[str]) -> None:
    def repeat() -> None:
        for _ in range(3):
            compare(inputs(), {})

    repeat()
    assert general == TWO_CALLS
    tile = tuning.Tile(16, 16, 4, 1)
    with tuning.override({"forward": tile, "dkv": tile, "dq": tile}):
        repeat()
        assert general == TWO_CALLS * 2
    repeat()
    assert general == TWO_CALLS * 3
    # torch's older switch, `get_float32_matmul_precision`, raises from here on.
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    repeat()
    assert general == TWO_CALLS * 4


def test_another_gpu_than_the_current_one(
    general: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(inputs(), {})
    compare(inputs(), {})
    current = ["cuda:0"]

    class Device:
        def __init__(self, device: torch.device) -> None:
            current.append("cuda:1")

        def __enter__(self) -> None: ...

        def __exit__(self, *args: object) -> None:
            current.pop()

    for module in (prepared, run_forward):
        monkeypatch.setattr(module, "on_other_device", lambda tensor: current[-1] == "cuda:0")
    monkeypatch.setattr(torch.cuda, "device", Device)
    relu_attention(*inputs(), impl="triton")
    assert general == TWO_CALLS and current == ["cuda:0"]


def test_saved_tensors_that_come_back_in_another_layout() -> None:
    for _ in range(3):
        compare(inputs(), NORMALISED)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, misaligned_or_wide):
        compare(inputs(), NORMALISED)


def misaligned_or_wide(tensor: Tensor) -> Tensor:
    return in_a_wider_tensor(tensor) if tensor.dim() == 4 else misaligned(tensor)


def test_gradients_of_gradients() -> None:
    q, k, v = (tensor.requires_grad_() for tensor in inputs())
    second = {}
    for impl in ("reference", "triton", "triton", "triton"):
        out = relu_attention(q, k, v, power=2, impl=impl)
        (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        (second[impl],) = torch.autograd.grad(dq.square().sum(), k)
        # Squares of squares of rounded outputs.
        torch.testing.assert_close(second[impl], second["reference"], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("options", [{"dropout_p": 0.5}, {"mask": torch.rand(20, 20) > 0.2}])
def test_calls_that_are_never_prepared(options: dict[str, Any]) -> None:
    q, k, v = inputs()
    first, second = (relu_attention(q, k, v, impl="triton", **options) for _ in range(2))
    assert torch.equal(first, second) == ("mask" in options)
    assert [choice.prepared for choice in signature.CHOICES.values()] == [None]
