"""Inputs for the tests of the operations, made from the table so that a new row needs none."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from reluformer import ATTENTIONS
from reluformer.ops.definition import Attention

NAMES = list(ATTENTIONS)
every_attention = pytest.mark.parametrize("name", NAMES)

WAYS = [*((name, "reference") for name in NAMES), ("softmax", "sdpa")]
"""Attention and implementation: the invariances hold for every way to run a call."""
every_way = pytest.mark.parametrize(("name", "impl"), WAYS)

RANGES = {"alpha": (1.2, 1.8)}
"""Where random values of a tensor option lie, if not in [0.2, 0.8]."""

NUMBERS: dict[str, Any] = {
    "epsilon": 0.1,
    "kappa": 1.5,
    "keep": 2,
    "lam_init": 0.4,
    "length_exponent": 0.8,
    "negative_slope": 0.3,
    "power": 2,
}
"""Values other than the defaults for options that are plain numbers."""


def make(
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    rows: int = 3,
    keys: int = 5,
    width: int = 8,
    value_width: int = 6,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    requires_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q [B, H, Tq, D], k [B, Hkv, Tk, D], v [B, Hkv, Tk, Dv].

    Each key resembles some query, so that thresholds above chance are passed here and there.
    """
    source = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, heads, rows, width, generator=source, dtype=torch.float64)
    k = torch.randn(batch, kv_heads, keys, width, generator=source, dtype=torch.float64)
    v = torch.randn(batch, kv_heads, keys, value_width, generator=source, dtype=torch.float64)
    k = k + 0.8 * q[:, :: heads // kv_heads][:, :, torch.arange(keys) % rows]
    q, k, v = (tensor.to(dtype).requires_grad_(requires_grad) for tensor in (q, k, v))
    return q, k, v


def tensor_options(
    name: str, q: Tensor, v: Tensor, seed: int = 1, requires_grad: bool = False
) -> dict[str, Tensor]:
    """A random tensor for every option of the attention that may be one."""
    row, heads, width = ATTENTIONS[name], q.shape[1], v.shape[3]
    shapes = {
        "head": (heads,),
        "width": (heads * width,),
        "pair": (2,),
        "token": (*q.shape[:3], width),
    }
    source = torch.Generator().manual_seed(seed)
    options = {}
    for option in tensor_option_names(row):
        low, high = RANGES.get(option, (0.2, 0.8))
        shape = shapes[row.learned.get(option, "head")]
        value = low + (high - low) * torch.rand(shape, generator=source, dtype=torch.float64)
        options[option] = value.to(q.dtype).requires_grad_(requires_grad)
    return options


def tensor_option_names(row: Attention) -> list[str]:
    """Options whose annotation allows a tensor."""
    found = []
    for function in (row.weigh, row.rule, row.output_transform):
        parameters = inspect.signature(function).parameters.values() if function else ()
        found += [p.name for p in parameters if _may_be_tensor(p) and p.name in row.options]
    return sorted(set(found))


def number_options(name: str) -> dict[str, Any]:
    """Values other than the defaults for the attention's plain numbers."""
    row = ATTENTIONS[name]
    plain = row.options - set(tensor_option_names(row))
    return {option: NUMBERS[option] for option in sorted(plain & set(NUMBERS))}


def gradients(output: Tensor, inputs: list[Tensor], seed: int = 2) -> list[Tensor]:
    """Gradients of a random weighted sum of `output`, zeros for an input that it never met."""
    source = torch.Generator().manual_seed(seed)
    probe = torch.randn(output.shape, generator=source, dtype=torch.float64).to(output.dtype)
    total = (output * probe).sum()
    found = torch.autograd.grad(total, inputs, allow_unused=True, retain_graph=True)
    pairs = zip(found, inputs, strict=True)
    return [torch.zeros_like(tensor) if grad is None else grad for grad, tensor in pairs]


def assert_same(actual: Any, expected: Any) -> None:
    """Equal to the last bit: for what must not move at all."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def _may_be_tensor(parameter: inspect.Parameter) -> bool:
    keyword = parameter.kind is inspect.Parameter.KEYWORD_ONLY
    return keyword and "Tensor" in str(parameter.annotation)
