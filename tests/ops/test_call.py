"""Bad input is refused in one sentence: the argument, its value, what is allowed."""

import re
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from reluformer import attention, relu_attention
from reluformer.errors import UserError
from tests.ops.inputs import every_attention, every_way, make, tensor_options

Q, K, V = make(dtype=torch.float32)


def _message(*tensors: Any, name: str = "relu", **arguments: Any) -> str:
    with pytest.raises(UserError) as caught:
        attention(name, *(tensors or (Q, K, V)), **arguments)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 400
    return text


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (([[1.0]], K, V), r"q must be a tensor of shape \[B, heads, T, D\], got list"),
        ((Q, K[0], V), r"k must be a tensor .*, got \(2, 5, 8\)"),
        ((Q, K, None), r"v must be a tensor .*, got NoneType"),
        ((torch.tensor(1.0), K, V), r"q must be a tensor .*, got \(\)"),
        ((Q.long(), K.long(), V.long()), r"dtype of float16.*got torch.int64, torch.int64"),
        ((Q, K.double(), V), r"q, k and v must share one dtype.*got torch.float32, torch.float64"),
        ((Q, K, V.half()), r"share one dtype .* and torch.float16"),
        ((Q[..., :0], K[..., :0], V), r"q must have a width D of at least 1, .*\(2, 4, 3, 0\)"),
        ((Q, K[:1], V), r"k must match q in batch and width.*\(2, 4, 3, 8\).*\(1, 2, 5, 8\)"),
        ((Q, K[..., :7], V), r"k must match q in batch and width.*\(2, 2, 5, 7\)"),
        ((Q, K, V[:, :1]), r"v must match k in batch, heads and keys.*\(2, 1, 5, 6\)"),
        ((Q, K, V[:, :, :4]), r"v must match k in batch, heads and keys.*\(2, 2, 4, 6\)"),
        ((Q[:, :3], K, V), r"q's heads must be a multiple of k's heads, got 3 and 2"),
        ((Q, K[:, :0], V[:, :0]), r"multiple of k's heads, got 4 and 0"),
        ((Q[:, :0], K, V), r"multiple of k's heads, got 0 and 2"),
    ],
)
def test_tensors_that_do_not_fit(tensors: tuple[Any, ...], message: str) -> None:
    assert re.search(message, _message(*tensors))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scale": float("nan")}, r"scale must be a finite number, got nan"),
        ({"scale": torch.tensor(1.0)}, r"scale must be a finite number, got tensor"),
        ({"scale": "1"}, r"scale must be a finite number, got '1'"),
        ({"dropout_p": 1.0}, r"dropout_p must be a number in \[0, 1\), got 1.0"),
        ({"dropout_p": -0.1}, r"dropout_p .* got -0.1"),
        ({"dropout_p": None}, r"dropout_p .* got None"),
        ({"mask": torch.ones(5)}, r"mask must be a bool tensor \(True = visible\), got torch.fl"),
        ({"mask": [[True]]}, r"mask must be a bool tensor .*, got list"),
        ({"mask": torch.ones(4, dtype=torch.bool)}, r"mask .* \[2, 4, 3, 5\], got \[4\]"),
        ({"mask": torch.ones(1, 1, 1, 1, 1, dtype=torch.bool)}, r"mask must be broadcastable"),
        ({"bias": 0.5}, r"bias must be a floating-point tensor, got float"),
        ({"bias": torch.ones(5, dtype=torch.int32)}, r"bias must be .*, got torch.int32"),
        ({"bias": torch.ones(3, 4)}, r"bias must be broadcastable .* got \[3, 4\]"),
        ({"key_lengths": [5, 5]}, r"key_lengths must be an integer tensor of shape \[2\], got li"),
        ({"key_lengths": torch.ones(2)}, r"key_lengths .*, got torch.float32 of shape \[2\]"),
        ({"key_lengths": torch.ones(2) > 0}, r"key_lengths .*, got torch.bool"),
        ({"key_lengths": torch.tensor([3])}, r"key_lengths .* got torch.int64 of shape \[1\]"),
        ({"window": 0}, r"window must be a whole number of at least 1, got 0"),
        ({"window": True}, r"window must be a whole number of at least 1, got True"),
        ({"causal": "yes"}, r"causal must be True or False, got 'yes'"),
        ({"causal": None}, r"causal must be True or False, got None"),
        ({"power": 2.0}, r"power must be 1, 2, 4 or 8, got 2.0"),
        ({"power": True}, r"power must be 1, 2, 4 or 8, got True"),
        ({"length_exponent": "a"}, r"length_exponent must be a number, got 'a'"),
        ({"row_normalise": "a"}, r"row_normalise must be a number, got 'a'"),
        ({"negative_slope": None}, r"negative_slope must be a number, got None"),
        ({"window": 2**31 - 1}, r"window must be at most 1073741824, got 2147483647"),
        ({"window": sys.maxsize}, r"window must be at most 1073741824, got"),
        ({"scale": 10**5000}, r"scale must be a finite number, got a number"),
        (
            {"gamma": 10**5000},
            r"gamma must be a finite number greater than 0, got a number",
        ),
        ({"threshold": -(10**5000)}, r"threshold must be a finite number, got a number of more"),
        (
            {"length_exponent": 10**5000},
            r"length_exponent must be finite and >= 0, got a number",
        ),
        (
            {"row_normalise": 10**5000},
            r"row_normalise must be a finite number of at least 1e-30, got a num",
        ),
        ({"window": 1.5}, r"window must be a whole number of at least 1, got 1.5"),
        ({"is_causal": True}, r"no option 'is_causal'; its options: gamma, length_exponent, neg"),
        ({"second": None}, r"relu attention has no option 'second'"),
        ({"impl": "fast"}, r"impl must be one of auto, .*reference.*, got 'fast'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_do_not_fit(arguments: dict[str, Any], message: str) -> None:
    assert re.search(message, _message(**arguments))


@pytest.mark.parametrize(
    ("name", "option", "value", "message"),
    [
        ("relu_n", "length_exponent", "a", "must be a number, got 'a'"),
        ("relu_n", "length_exponent", 2000, "must be at most 1000, got 2000"),
        ("entmax", "alpha", "x", "must be a number or a tensor .* got 'x'"),
        ("sigmoid", "offset", "x", "must be a number or a tensor .* got 'x'"),
        ("polynomial", "power", 10**400, "must be a number or a tensor"),
        ("tra", "kappa", None, "must be a number or a tensor .* got None"),
        ("assa", "mix", torch.tensor([1, 1]), "must be a floating-point tensor, got torch.int64"),
        ("sink", "sink", torch.ones(4) * 1j, "must be a floating-point tensor, got torch.complex"),
    ],
)
def test_options_that_are_no_numbers(name: str, option: str, value: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"{option} {message}"):
        attention(name, Q, K, V, **{option: value})


@pytest.mark.parametrize("arguments", [(["relu"],), ("relu", ["auto"])])
def test_names_that_are_no_text(arguments: tuple[Any, ...]) -> None:
    name, impl = (*arguments, "auto")[:2]
    with pytest.raises(UserError, match=r"unknown attention \['relu'\]|got \['auto'\]"):
        attention(name, Q, K, V, impl=impl)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "relu",
            {"gamma": torch.ones(3)},
            r"gamma must be a number or .* \[4\].*, got shape \[3\]",
        ),
        ("relu", {"gamma": torch.ones(4, 1, 1)}, r"gamma must be .*, got shape \[4, 1, 1\]"),
        ("relu", {"gamma": "large"}, r"gamma must be a number or a tensor .*, got 'large'"),
        ("relu", {"threshold": None}, r"threshold must be a number .*, got None"),
        ("sink", {"sink": torch.ones(2)}, r"sink must be a number or .* \[4\].*, got shape \[2\]"),
        ("entmax", {"alpha": torch.ones(5)}, r"alpha must be a number or .* got shape \[5\]"),
        ("tra", {"beta": torch.ones(3)}, r"beta must be a number or .* got shape \[3\]"),
        (
            "rela",
            {"gain": torch.ones(6)},
            r"gain must be a tensor of shape .*\[24\], got shape \[6",
        ),
        ("rela", {"gate": 1.0}, r"gate must be a tensor of shape \[H \* Dv\] = \[24\], got 1.0"),
        ("assa", {"mix": torch.ones(3)}, r"mix must be a tensor of shape \[2\], got shape \[3\]"),
        ("gated", {"gate": torch.ones(5)}, r"gate .* \[2, 4, 3, 6\], got shape \[5\]"),
        ("softmax", {"gamma": 1.0}, r"softmax attention has no option 'gamma'; its options: none"),
        ("entmax", {"alpha": 1.0}, r"alpha must be greater than 1 and at most 2, got 1.0"),
        ("entmax", {"alpha": 2.5}, r"alpha must be greater than 1 and at most 2, got 2.5"),
        ("top_k", {"keep": 0}, r"keep must be a whole number of at least 1, got 0"),
        ("top_k", {"keep": 2.0}, r"keep must be a whole number of at least 1, got 2.0"),
        ("polynomial", {"power": 1.5}, r"power must be a whole number of at least 1, got 1.5"),
        ("lssar", {"power": 0}, r"power must be greater than 0, got 0"),
        ("softpick", {"epsilon": 0.0}, r"epsilon must be greater than 0, got 0.0"),
        ("tra", {"kappa": -1.0}, r"kappa must be greater than 0, got -1.0"),
        ("tda", {"power": 5}, r"power must be 1, 2, 4 or 8, got 5"),
        ("cosine_relu", {"temperature": 0.0}, r"temperature must be greater than 0, got 0.0"),
    ],
)
def test_options_that_do_not_fit(name: str, options: dict[str, Any], message: str) -> None:
    assert re.search(message, _message(name=name, **options))


def test_halves_need_an_even_width() -> None:
    for name in ("differential", "tda"):
        text = _message(Q[..., :7], K[..., :7], V, name=name)
        assert text == f"{name} attention needs an even width D, got 7"


def test_what_is_allowed_is_accepted() -> None:
    assert relu_attention(Q, K, V, gamma=torch.tensor(2.0), window=1, dropout_p=0).shape == (
        (2, 4, 3, 6)
    )
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        lengths = torch.tensor([5, 2], dtype=dtype)
        assert relu_attention(Q, K, V, key_lengths=lengths, check=True).isfinite().all()
    attention("rela", Q, K, V, gain=None, gate=None)
    attention("gated", Q, K, V, gate=torch.ones(4, 1, 6))


def _nan_at(tensor: Tensor, value: float = float("nan")) -> Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[1] = value
    return tensor


@pytest.mark.parametrize(
    ("tensors", "arguments", "message"),
    [
        ((_nan_at(Q), K, V), {}, "q must be finite, but holds NaN or infinite values"),
        ((Q, _nan_at(K, float("inf")), V), {}, "k must be finite"),
        ((Q, K, _nan_at(V)), {}, "v must be finite"),
        ((Q, K, V), {"bias": _nan_at(torch.zeros(5))}, "bias must be finite or -inf"),
        ((Q, K, V), {"bias": torch.tensor(float("inf"))}, "but holds NaN or +inf"),
        ((Q, K, V), {"key_lengths": torch.tensor([5, 6])}, "between 0 and 5, got [5, 6]"),
        ((Q, K, V), {"key_lengths": torch.tensor([-1, 2])}, "between 0 and 5, got [-1, 2]"),
        ((Q, K, V), {"gamma": torch.tensor(0.0)}, "gamma must be greater than 0, got 0.0"),
        ((Q, K, V), {"threshold": _nan_at(torch.zeros(4))}, "threshold must be finite"),
    ],
)
def test_contents_are_read_only_on_request(
    tensors: tuple[Tensor, ...], arguments: dict[str, Any], message: str
) -> None:
    relu_attention(*tensors, **arguments)
    assert message in _message(*tensors, **arguments, check=True)


def test_a_bias_of_minus_infinity_passes_the_check() -> None:
    bias = _nan_at(torch.zeros(5), float("-inf"))
    assert relu_attention(Q, K, V, bias=bias, check=True).isfinite().all()


def test_the_range_of_an_alpha_tensor_is_checked_on_request() -> None:
    for value in (1.0, 2.1):
        alpha = torch.full((4,), value)
        assert "alpha must be greater than 1 and at most 2" in _message(
            name="entmax", alpha=alpha, check=True
        )


@every_way
def test_no_call_reads_its_tensors(name: str, impl: str) -> None:
    """A fake tensor has no contents: record one, to branch or to size something, raises."""
    q, k, v = make(dtype=torch.float32)
    tensors = {"mask": torch.ones(2, 1, 3, 5, dtype=torch.bool), "bias": torch.zeros(3, 5)}
    arguments = {**tensors, "key_lengths": torch.tensor([5, 3]), **tensor_options(name, q, v)}
    extras = {"return_weights": True, "return_stats": True} if impl == "reference" else {}
    with FakeTensorMode() as mode:
        fake = {key: mode.from_tensor(value) for key, value in arguments.items()}
        inputs = [mode.from_tensor(t).requires_grad_() for t in (q, k, v)]
        result = attention(name, *inputs, causal=True, window=4, impl=impl, **fake, **extras)
        output = result.output if extras else result
        output.sum().backward()
        assert inputs[0].grad.shape == q.shape
        with pytest.raises(DataDependentOutputException):
            attention(name, *inputs, impl=impl, check=True)


@every_attention
def test_shapes_follow_on_the_meta_device(name: str) -> None:
    q, k, v = (t.to("meta") for t in make())
    result = attention(name, q, k, v, causal=True, return_weights=True, return_stats=True)
    assert result.output.shape == (2, 4, 3, 6)
    assert result.weights.shape == (2, 4, 3, 5)
    assert all(field.shape == (2, 4, 3) for field in result.stats)
