"""impl="auto" runs under every transform of torch.func, forward-mode AD and double backward."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import grad, jacfwd, jacrev, jvp, vmap

from reluformer import attention, relu_attention
from reluformer.errors import UserError
from tests.ops.inputs import make

OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True, "window": 3},
    {"key_lengths": torch.tensor([3, 5]), "mask": torch.rand(3, 5) > 0.2},
]
every_call = pytest.mark.parametrize("options", OPTIONS, ids=["plain", "causal", "mask"])
every_name = pytest.mark.parametrize("name", ["relu", "softmax", "cosine_relu"])

pytestmark = pytest.mark.usefixtures("compiled")


def maps(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Callable[..., Callable[..., Tensor]]]:
    """Queries, and functions of them for an attention and an implementation."""
    q, k, v = make(dtype=dtype)
    return q, lambda name, impl, options: lambda q: attention(name, q, k, v, impl=impl, **options)


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "grad": lambda f, q: grad(lambda q: f(q).square().sum())(q),
    "vmap": lambda f, q: vmap(f)(torch.stack([q, 2 * q])),
    "vmap of grad": lambda f, q: vmap(grad(lambda q: f(q).square().sum()))(torch.stack([q, -q])),
    "jvp": lambda f, q: jvp(f, (q,), (q.cos(),)),
    "jacrev": lambda f, q: jacrev(f)(q),
    "jacfwd": lambda f, q: jacfwd(f)(q),
}


@every_name
@every_call
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(name: str, options: dict[str, Any], transform: str) -> None:
    q, maker = maps()
    maker(name, "auto", options)(q)  # The remembered choice must not count.
    found, wanted = (
        TRANSFORMS[transform](maker(name, impl, options), q) for impl in ("auto", "reference")
    )
    torch.testing.assert_close(found, wanted)


@every_name
@every_call
def test_forward_mode(name: str, options: dict[str, Any]) -> None:
    q, maker = maps()
    maker(name, "auto", options)(q)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, q.cos())
        found = forward_ad.unpack_dual(maker(name, "auto", options)(dual)).tangent
    torch.testing.assert_close(found, jvp(maker(name, "reference", options), (q,), (q.cos(),))[1])


@every_call
@pytest.mark.parametrize("impl", ["auto", "cpu"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"power": 4, "row_normalise": 0.1},
        {"power": 2, "gamma": True, "threshold": True, "return_sums": "entropy"},
    ],
    ids=["plain", "normalised", "learned"],
)
def test_double_backward(options: dict[str, Any], impl: str, more: dict[str, Any]) -> None:
    def slopes(impl: str) -> list[Tensor]:
        inputs = list(make(dtype=torch.float64, requires_grad=True))
        learned = {
            name: torch.full((4,), value, dtype=torch.float64, requires_grad=True)
            for name, value in (("gamma", 1.5), ("threshold", -0.1))
            if name in more
        }
        inputs += learned.values()
        q, k, v = inputs[:3]
        # k depends on q: only the path through q itself is q's own gradient.
        arguments: dict[str, Any] = {**options, **more, **learned}
        result: Any = relu_attention(q, k + q[:, ::2, :1], v, impl=impl, **arguments)
        loss = result.square().sum() if isinstance(result, Tensor) else (
            result.output.square().sum() + result.sums.entropy.sum() + result.sums.row_sum.sum()
        )  # fmt: skip
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), inputs)
        return [*first, *second]

    torch.testing.assert_close(slopes(impl), slopes("reference"))


@every_call
def test_double_backward_of_softmax(options: dict[str, Any]) -> None:
    def slopes(impl: str) -> list[Tensor]:
        q, k, v = inputs = make(dtype=torch.float64, requires_grad=True)
        output = attention("softmax", q, k + q[:, ::2, :1], v, impl=impl, **options)
        first = torch.autograd.grad(output.square().sum(), inputs, create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), inputs)]

    torch.testing.assert_close(slopes("auto"), slopes("reference"))


@every_call
def test_double_backward_of_the_triton_kernels(options: dict[str, Any]) -> None:
    if torch.cuda.is_available():
        pytest.skip("the interpreter is off")

    def slopes(impl: str) -> list[Tensor]:
        inputs = make(dtype=torch.float32, width=16, value_width=16, requires_grad=True)
        gamma = torch.full((4,), 1.5, requires_grad=True)
        output = relu_attention(*inputs, gamma=gamma, power=2, impl=impl, **options)
        first = torch.autograd.grad(output.square().sum(), [*inputs, gamma], create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), [*inputs, gamma])
        return [*first, *second]

    torch.testing.assert_close(slopes("triton"), slopes("reference"), rtol=1e-3, atol=1e-4)


def test_double_backward_uses_the_same_dropout() -> None:
    q, k, v = make(dtype=torch.float64, requires_grad=True)
    output = relu_attention(q, k, v, dropout_p=0.5, impl="cpu")
    weight = torch.randn_like(output)
    (plain,) = torch.autograd.grad((output * weight).sum(), q, retain_graph=True)
    (twice,) = torch.autograd.grad((output * weight).sum(), q, create_graph=True)
    torch.testing.assert_close(twice, plain)


def test_named_kernels_refuse_transforms_in_one_sentence() -> None:
    q, maker = maps()
    with pytest.raises(UserError, match=r"impl='cpu' cannot run .*torch.func transforms"):
        vmap(maker("relu", "cpu", {}))(q[None])


def test_a_subclass_that_replaces_operators_reaches_no_kernel() -> None:
    q, k, v = make(dtype=torch.float32)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(k)
    with pytest.raises(UserError, match="fused kernels take no FakeTensor next to a plain q"):
        relu_attention(q, fake, v, impl="cpu")


FRESH = """
import torch
from reluformer import relu_attention
q, k, v = (torch.randn(1, 2, 8, 16, requires_grad=True) for _ in "qkv")
function = torch.compile(relu_attention, fullgraph=True, backend="aot_eager")
function(q, k, v, causal=True, power=2).sum().backward()
found = q.grad.clone()
q.grad = None
relu_attention(q, k, v, causal=True, power=2).sum().backward()
torch.testing.assert_close(found, q.grad)
"""


def test_compilation_is_the_first_thing_in_a_process() -> None:
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_numbers_that_a_compiler_replaces_by_symbols() -> None:
    q, k, v = make(dtype=torch.float32)
    function = torch.compile(attention, fullgraph=True, backend="eager", dynamic=True)
    for name, option in (
        ("leaky_relu", {"negative_slope": 0.3}),
        ("normalised_relu", {"power": 4}),
    ):
        wanted = attention(name, q, k, v, **option)
        torch.testing.assert_close(function(name, q, k, v, **option), wanted)


def test_softmax_on_a_gpu_is_one_graph() -> None:
    # The question whether inference mode is on, asked on GPUs only, cannot be traced.
    with FakeTensorMode():
        q = torch.empty(2, 4, 16, 64, device="cuda")
        function = torch.compile(
            lambda q: attention("softmax", q, q, q), fullgraph=True, backend="eager"
        )
        assert function(q).shape == q.shape
