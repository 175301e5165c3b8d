"""Cases of torch's own tests of MultiheadAttention, for every kind of attention.

Re-expressed are, from `test/nn/test_multihead_attention.py` of torch: the naive reference with
appended keys and padding, masks for each batch element, no biases, invalid shapes, and two masks in
evaluation mode. Left out are saved keys (`static_k`), which the module does not take, and nested
tensors, which are refused.
"""

from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from reluformer.errors import UserError
from reluformer.nn import MultiheadAttention
from tests.ops.oracles import ORACLES, Row

KINDS = ("softmax", "normalised_relu", "relu", "entmax15")


def naive(
    layer: MultiheadAttention, query: Tensor, memory: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor]:
    """Output [B, Tq, E] and weights [B, H, Tq, Tk] by loops over batch, heads and rows.

    query is [B, Tq, E], memory [B, Tk, kdim], hidden bool [B, Tq, Tk].
    """
    weights = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
    if layer.in_proj_weight is not None:
        weights = layer.in_proj_weight.chunk(3)
    biases = layer.in_proj_bias.chunk(3)
    inputs = (query, memory, memory)
    q, k, v = (x @ w.T + b for x, w, b in zip(inputs, weights, biases, strict=True))
    appended = torch.zeros(*hidden.shape[:2], 1, dtype=torch.bool)
    if layer.bias_k is not None:
        k = torch.cat([k, layer.bias_k.expand(k.shape[0], 1, -1)], dim=1)
        v = torch.cat([v, layer.bias_v.expand(v.shape[0], 1, -1)], dim=1)
        hidden = torch.cat([hidden, appended], dim=2)
    if layer.add_zero_attn:
        k, v = (torch.nn.functional.pad(each, (0, 0, 0, 1)) for each in (k, v))
        hidden = torch.cat([hidden, appended], dim=2)
    options = {
        name: each.item() if each.dim() == 0 else each.tolist()
        for name, each in layer.core.options().items()
        if isinstance(each, Tensor)
    }
    width = layer.head_dim
    maps = torch.zeros(q.shape[0], layer.num_heads, q.shape[1], k.shape[1], dtype=q.dtype)
    heads = torch.zeros_like(q)
    for b, h, i in torch.ones(maps.shape[:3]).nonzero().tolist():
        columns = slice(h * width, (h + 1) * width)
        seen = (~hidden[b, i]).nonzero().flatten()
        scores = (k[b, seen, columns] @ q[b, i, columns]) / width**0.5
        own = {name: each[h] if isinstance(each, list) else each for name, each in options.items()}
        if len(seen):
            row = ORACLES[layer.core.row.name].weigh(Row(scores.tolist(), width), **own)
            maps[b, h, i, seen] = torch.tensor(row, dtype=q.dtype)
        heads[b, i, columns] = maps[b, h, i] @ v[b, :, columns]
    return layer.out_proj(heads), maps


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"add_bias_kv": True},
        {"add_zero_attn": True},
        {"padding": True},
        {"padding": True, "add_bias_kv": True, "add_zero_attn": True},
        {"padding": True, "add_zero_attn": True, "same": True},
    ],
    ids=lambda arguments: " ".join(arguments) or "plain",
)
@torch.no_grad()
def test_multihead_attention(kind: str, average: bool, arguments: dict[str, bool]) -> None:
    random = Random(str((kind, arguments)))
    options = {name: arguments.get(name, False) for name in ("add_bias_kv", "add_zero_attn")}
    for _ in range(3):
        batch, keys = random.randint(2, 4), random.randint(2, 6)
        heads, width = 2 * random.randint(1, 2), random.randint(3, 6)
        embed = heads * width
        kdim = embed if arguments.get("same") else random.randint(5, 9)
        sizes: dict[str, Any] = {"kdim": kdim, "vdim": kdim, "dtype": torch.float64}
        layer = MultiheadAttention(embed, heads, **options, **sizes, attention=kind)
        for parameter in layer.core.parameters():
            parameter.normal_(std=0.2)
        query, memory = (torch.rand(batch, n, d).double() for n, d in ((1, embed), (keys, kdim)))
        mask = torch.rand(1, keys) > 0.5
        padding = torch.rand(batch, keys) > 0.5 if arguments.get("padding") else None
        hidden = mask.expand(batch, 1, keys)
        if padding is not None:
            hidden = hidden | padding[:, None]
        expected, maps = naive(layer, query, memory, hidden)
        output, weights = layer(
            query.transpose(0, 1),
            memory.transpose(0, 1),
            memory.transpose(0, 1),
            key_padding_mask=padding,
            attn_mask=torch.zeros(1, keys).double().masked_fill(mask, -torch.inf),
            average_attn_weights=average,
        )
        torch.testing.assert_close(output.transpose(0, 1), expected)
        torch.testing.assert_close(weights, maps.mean(dim=1) if average else maps)


@pytest.mark.parametrize("kind", KINDS)
def test_multihead_attn_3d_attn_mask(kind: str) -> None:
    layer = MultiheadAttention(8, 4, attention=kind).double()
    query, key = torch.rand(2, 8, 8).double(), torch.rand(3, 8, 8).double()
    mask = torch.randint(2, (8, 2, 3)).double().log()
    together = layer(query, key, key, attn_mask=mask.repeat_interleave(4, dim=0))[0]
    for index in range(8):
        one = slice(index, index + 1)
        alone = layer(query[:, one], key[:, one], key[:, one], attn_mask=mask[index])[0]
        torch.testing.assert_close(together[:, one], alone)


def test_multihead_attn_no_bias() -> None:
    layer = MultiheadAttention(8, 4, bias=False)
    assert layer.in_proj_bias is None and layer.out_proj.bias is None


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("evaluated", [False, True])
def test_multihead_attn_invalid_shape(batch_first: bool, evaluated: bool) -> None:
    layer = MultiheadAttention(4, 4, batch_first=batch_first).train(not evaluated)
    flat, batched = torch.randn(4, 4), torch.randn(4, 4, 4)
    vector = torch.tensor([False, False, True, True])
    calls: list[tuple[tuple[Tensor, ...], dict[str, Tensor], str]] = [
        ((batched, flat, batched), {}, "key must have 3 dimensions, or 2 if all inputs"),
        ((batched, batched, flat), {}, "value must have 3 dimensions"),
        ((flat, batched, flat), {}, "key must have 3 dimensions, or 2 if all inputs"),
        ((flat, flat, batched), {}, "value must have 3 dimensions"),
        ((batched,) * 3, {"key_padding_mask": vector}, r"must have shape \(4, 4\), got \(4,\)"),
        ((batched,) * 3, {"attn_mask": vector}, r"shape \(4, 4\) or \(16, 4, 4\), got \(4,\)"),
        ((flat,) * 3, {"key_padding_mask": vector[None]}, r"shape \(1, 4\), got \(1, 1, 4\)"),
        ((flat,) * 3, {"attn_mask": vector}, r"attn_mask must have shape \(4, 4\) or"),
        ((flat,) * 3, {"attn_mask": torch.rand(5, 4, 4) > 0.5}, r"or \(4, 4, 4\), got \(5, 4, 4"),
    ]
    for inputs, masks, message in calls:
        with torch.set_grad_enabled(not evaluated), pytest.raises(UserError, match=message):
            layer(*inputs, **masks)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_multihead_self_attn_two_masks(kind: str) -> None:
    layer = MultiheadAttention(14, 7, batch_first=True, attention=kind).double()
    x = torch.rand(8, 5, 14).double()
    mask, padding = torch.rand(5, 5) > 0.5, torch.rand(8, 5) > 0.5
    expected, maps = naive(layer, x, x, mask | padding[:, None])
    for training in (True, False):
        output, weights = layer.train(training)(
            x, x, x, attn_mask=mask, key_padding_mask=padding, average_attn_weights=False
        )
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(weights, maps)
