"""Small memories of every kind, and a literal implementation of each formula."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from reluformer.model.memory import MEMORIES, KeyValueMemory

KINDS = list(MEMORIES)
every_kind = pytest.mark.parametrize("kind", KINDS)

OPTIONS: dict[str, dict[str, Any]] = {
    "top_k": {"k": 3},
    "product_key_softmax": {"k": 3, "heads": 2},
    "product_key_relu": {"k": 3, "heads": 2},
    "sigma_moe": {"experts": 4, "k": 2},
    "persistent": {"heads": 2},
}
"""Options that make a kind select among 16 slots; none for the others."""


def make(
    kind: str, width: int = 6, slots: int = 16, dtype: torch.dtype = torch.float64, **more: Any
) -> KeyValueMemory:
    """A memory of that kind, with random numbers in place of its zero biases."""
    memory = KeyValueMemory(width, slots, kind, **{**OPTIONS.get(kind, {}), **more}).to(dtype)
    with torch.no_grad():
        for name, parameter in memory.named_parameters():
            if "bias" in name:
                parameter.normal_()
    return memory


def takes_bias(kind: str) -> bool:
    """Whether a kind can have biases."""
    return not MEMORIES[kind].selector.by_head


def scores(memory: KeyValueMemory, x: Tensor, name: str = "keys") -> Tensor:
    """x [N, width] against every row of a table."""
    found = x @ memory.get_parameter(name).T
    return found + memory.get_parameter(f"{name}_bias") if memory.bias else found


def relu(s: Tensor) -> Tensor:
    """max(s, 0)."""
    return torch.where(s > 0, s, 0.0)


def gelu(s: Tensor) -> Tensor:
    """s times the normal distribution function."""
    return s * (1 + torch.erf(s / math.sqrt(2))) / 2


def softmax(s: Tensor) -> Tensor:
    """exp(s) / sum exp(s) over the last dimension."""
    return s.exp() / s.exp().sum(-1, keepdim=True)


def _elementwise(weights: Callable[[Tensor], Tensor]) -> Callable[[KeyValueMemory, Tensor], Tensor]:
    return lambda memory, x: weights(scores(memory, x)) @ memory.values


def _gated(weights: Callable[[Tensor], Tensor]) -> Callable[[KeyValueMemory, Tensor], Tensor]:
    return lambda m, x: (weights(scores(m, x)) * scores(m, x, "gate")) @ m.values


def _top_k(memory: KeyValueMemory, x: Tensor) -> Tensor:
    rows = []
    for row in scores(memory, x):
        best = sorted(range(memory.slots), key=lambda slot: -row[slot].item())[:3]
        rows.append(sum(relu(row[slot]) * memory.values[slot] for slot in best))
    return torch.stack(rows)


def _product_key(weights: Callable[[Tensor], Tensor]) -> Callable[[KeyValueMemory, Tensor], Tensor]:
    def read(memory: KeyValueMemory, x: Tensor) -> Tensor:
        output = torch.zeros_like(x)
        for all_scores in product_key_scores(memory, x):
            best, slots = all_scores.sort(descending=True)
            kept, slots = best[:, :3], slots[:, :3]
            output = output + torch.einsum("nk,nkd->nd", weights(kept), memory.values[slots])
        return output

    return read


def product_key_scores(memory: KeyValueMemory, x: Tensor) -> list[Tensor]:
    """For each head, the scores of all slots [N, slots], from keys written out in full."""
    first, second = memory.keys
    queries = (x @ memory.get_parameter("queries").T).chunk(len(first), dim=-1)
    found = []
    for query, a, b in zip(queries, first, second, strict=True):
        keys = torch.stack([torch.cat((one, other)) for one in a for other in b])
        found.append(query @ keys.T)
    return found


def _sigma_moe(memory: KeyValueMemory, x: Tensor) -> Tensor:
    all_scores, experts = scores(memory, x), memory.get_parameter("experts")
    gates = 1 / (1 + (-x @ experts.T).exp())
    each = memory.slots // len(experts)
    rows = []
    for gate, row in zip(gates, all_scores, strict=True):
        output = torch.zeros_like(x[0])
        for expert in gate.argsort(descending=True)[:2].tolist():
            for slot in range(expert * each, (expert + 1) * each):
                output = output + gate[expert] * relu(row[slot]) * memory.values[slot]
        rows.append(output)
    return torch.stack(rows)


def _persistent(memory: KeyValueMemory, x: Tensor) -> Tensor:
    heads, _, width = memory.keys.shape
    parts = []
    for head in range(heads):
        q = x[:, head * width : (head + 1) * width]
        weights = softmax(q @ memory.keys[head].T / math.sqrt(width))
        parts.append(weights @ memory.values[head])
    return torch.cat(parts, dim=-1)


ORACLES: dict[str, Callable[[KeyValueMemory, Tensor], Tensor]] = {
    "relu": _elementwise(relu),
    "softmax": _elementwise(softmax),
    "softmax_ln": _elementwise(softmax),
    "gelu": _elementwise(gelu),
    "squared_relu": _elementwise(lambda s: relu(s) * relu(s)),
    "reglu": _gated(relu),
    "swiglu": _gated(lambda s: s / (1 + (-s).exp())),
    "top_k": _top_k,
    "product_key_softmax": _product_key(softmax),
    "product_key_relu": _product_key(relu),
    "sigma_moe": _sigma_moe,
    "pattention": _elementwise(lambda s: gelu(s / ((s * s).sum(-1, keepdim=True) / 16).sqrt())),
    "persistent": _persistent,
}
"""The formula of each kind with 16 slots and the options above, before bias and norm."""


def oracle(memory: KeyValueMemory, x: Tensor) -> Tensor:
    """The output for x [N, width] by the literal formula."""
    output = ORACLES[memory.kind](memory, x)
    if memory.bias:
        output = output + memory.get_parameter("values_bias")
    if memory.kind == "softmax_ln":
        norm = memory.finish
        assert isinstance(norm, nn.LayerNorm)
        centred = output - output.mean(-1, keepdim=True)
        deviation = (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt()
        output = centred / deviation * norm.weight + norm.bias
    return output
