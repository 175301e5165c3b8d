"""Random tensors of every layout, dtype, device and transform: computed exactly or refused.

200 cases in `make test`, 1,400 in `make test-all`.
"""

import sys
import warnings
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from reluformer import ATTENTIONS, attention
from reluformer.ops.checks import FLOATS
from tests.fuzz.conftest import refusal

# The profile of `make test-all` has 100 examples for each test.
EXAMPLES = 100 if settings().max_examples < 100 else 700

Change = Callable[[Tensor], Any]


class Subclass(Tensor):
    """A tensor of another type."""


def _expanded(tensor: Tensor) -> Tensor:
    return tensor[..., :1].expand(tensor.shape) if tensor.dim() else tensor


def _strided(tensor: Tensor) -> Tensor:
    """The same numbers with other strides and another offset in memory."""
    wide = torch.stack([tensor, tensor], dim=-1).flatten()
    return wide[1::2].view(tensor.shape) if tensor.numel() else tensor


def _negated(tensor: Tensor) -> Tensor:
    """The same numbers as a lazy negation."""
    if tensor.dtype not in (torch.float32, torch.float64):
        return tensor
    return torch.complex(torch.zeros_like(tensor), -tensor).conj().imag


def _zero(tensor: Tensor) -> Tensor:
    return torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype)


def _with_nan(tensor: Tensor) -> Tensor:
    changed = tensor.clone()
    if changed.numel() and changed.is_floating_point():
        changed.view(-1)[-1] = torch.nan
    return changed


SAME_NUMBERS: dict[str, Change] = {
    "strided": _strided,
    "transposed": lambda t: t.mT.contiguous().mT if t.dim() > 1 else t,
    "channels last": lambda t: (
        t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t
    ),
    "negated": _negated,
    "parameter": lambda t: nn.Parameter(t, requires_grad=t.is_floating_point()),
    "subclass": lambda t: t.as_subclass(Subclass),
    "no storage shared": torch.clone,
}
OTHER: dict[str, Change] = {
    "expanded": _expanded,
    "zero": _zero,
    "meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "csr": lambda t: t.reshape(-1, max(t.shape[-1], 1)).to_sparse_csr() if t.dim() else t,
    "nested": lambda t: torch.nested.nested_tensor([t, t]),
    "mkldnn": lambda t: t.float().to_mkldnn(),
    "quantised": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
    "half": lambda t: t.half(),
    "double": lambda t: t.double(),
    "integer": lambda t: t.int(),
    "complex": lambda t: t.to(torch.complex64).conj(),
    "bool": lambda t: t > 0,
    "float8": lambda t: t.float().to(torch.float8_e4m3fn),
    "one less": lambda t: t[1:],
    "flat": lambda t: t.flatten(),
    "deeper": lambda t: t[None],
    "empty": lambda t: t[..., :0],
    "NaN": _with_nan,
    "numpy": lambda t: t.float().numpy(),
    "list": lambda t: t.tolist(),
    "none": lambda t: None,
    "number": lambda t: 1.0,
}

NUMBERS = st.sampled_from(
    [0, 1, 2, 4, 8, -1, 3, True, 2.0, 0.5, -0.5, 1e308, 1e-320, 2**31 - 1, sys.maxsize, 2**63,
     10**30, 10**400, 10**5000, Fraction(1, 3), Decimal(2), numpy.float32(0.5), numpy.int64(2),
     float("nan"), float("inf"), "x", None, 1j, [1.0], b"1"]
)  # fmt: skip
TRANSFORMS = ["none", "grad", "vmap", "jvp", "inference", "autocast", "double backward"]


def _arguments(data: st.DataObject) -> tuple[str, dict[str, Any]]:
    """A sound call: the name of an attention, and its arguments."""
    size = st.integers(1, 5)
    batch, heads, rows, keys, width = (data.draw(size) for _ in range(5))
    groups, dtype = data.draw(st.integers(1, 2)), data.draw(st.sampled_from(FLOATS))
    torch.manual_seed(data.draw(st.integers(0, 9)))
    name = data.draw(st.sampled_from(["relu", "relu", *ATTENTIONS]))
    width *= 1 + ATTENTIONS[name].halves
    arguments: dict[str, Any] = {
        "q": torch.randn(batch, heads * groups, rows, width, dtype=torch.float64).to(dtype),
        "k": torch.randn(batch, heads, keys, width, dtype=torch.float64).to(dtype),
        "v": torch.randn(batch, heads, keys, 3, dtype=torch.float64).to(dtype),
    }
    table = (batch, heads * groups, rows, keys)
    optional = {
        "mask": torch.rand(table) > 0.3,
        "bias": torch.randn(table).to(dtype),
        "key_lengths": torch.randint(0, keys + 1, (batch,)),
        "causal": True,
        "window": data.draw(size),
        "return_weights": True,
        "return_sums": "entropy",
    }
    if "gamma" in ATTENTIONS[name].options:
        optional |= {"gamma": torch.rand(heads * groups) + 0.5, "threshold": -0.5}
    chosen = data.draw(st.lists(st.sampled_from(sorted(optional)), unique=True, max_size=4))
    return name, arguments | {key: optional[key] for key in chosen}


def _run(name: str, arguments: dict[str, Any], transform: str) -> Any:
    """The output of a call under a transform; gradients are computed where it has them."""
    arguments = dict(arguments)
    q = arguments.pop("q")

    def call(q: Any) -> Any:
        result = attention(name, q, **arguments)
        return result if isinstance(result, Tensor) else result.output

    if transform == "grad":
        return torch.func.grad(lambda q: call(q).float().sum())(q)
    if transform == "vmap":
        return torch.func.vmap(call)(q[None])
    if transform == "jvp":
        return torch.func.jvp(call, (q,), (torch.ones_like(q),))
    if transform == "inference":
        with torch.inference_mode():
            return call(q)
    if transform == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            return call(q)
    if transform == "double backward":
        q = q.detach().requires_grad_()
        (first,) = torch.autograd.grad(call(q).float().sum(), q, create_graph=True)
        return first.float().sum().backward() if first.requires_grad else first
    return call(q)


def _is_ordinary(value: Any) -> bool:
    is_dense = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_nested
    return is_dense and value.dtype in FLOATS


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@given(data=st.data())
@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
def test_other_layouts_give_the_same_numbers(data: st.DataObject) -> None:
    name, arguments = _arguments(data)
    reference = attention(name, **arguments, impl="reference")
    changed = dict(arguments)
    for key, value in arguments.items():
        if isinstance(value, Tensor) and data.draw(st.booleans()):
            changed[key] = SAME_NUMBERS[data.draw(st.sampled_from(sorted(SAME_NUMBERS)))](value)
    result = attention(name, **changed)
    pairs = [(result, reference)] if isinstance(result, Tensor) else [(result[0], reference[0])]
    dtype = arguments["q"].dtype
    # Values are of order 1, and bfloat16 keeps 8 bits.
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2}.get(dtype, 1e-1)
    for got, wanted in pairs:
        close = torch.allclose(
            got.as_subclass(Tensor).double(), wanted.double(), tolerance, tolerance
        )
        assert close, (name, {k: type(v) for k, v in changed.items()})


@given(data=st.data())
@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
def test_any_arguments_are_computed_or_refused(data: st.DataObject) -> None:
    name, arguments = _arguments(data)
    changes = OTHER | SAME_NUMBERS
    for _ in range(data.draw(st.integers(0, 2))):
        key = data.draw(st.sampled_from(sorted(arguments)))
        if isinstance(arguments[key], Tensor):
            change = data.draw(st.sampled_from(sorted(changes)))
            try:
                arguments[key] = changes[change](arguments[key])
            except (RuntimeError, TypeError, NotImplementedError):
                # Torch has no such tensor.
                continue
        else:
            arguments[key] = data.draw(NUMBERS)
    if data.draw(st.booleans()):
        options = ["causal", "window", "scale", "dropout_p", "power", "gamma", "threshold", "impl",
                   "length_exponent", "negative_slope", "row_normalise", "entropy_every",
                   "return_sums", "alpha", "unknown"]  # fmt: skip
        arguments[data.draw(st.sampled_from(options))] = data.draw(NUMBERS)
    transform = data.draw(st.sampled_from(TRANSFORMS))
    if not _is_ordinary(arguments["q"]) or arguments["q"].device.type == "meta":
        transform = "none"
    refusal(lambda: _run(name, arguments, transform))
