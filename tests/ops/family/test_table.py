"""The matrix: every row of the table against its formula, and its gradients against differences."""

import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from reluformer import ATTENTIONS, attention
from reluformer.errors import UserError
from reluformer.ops.family import table
from reluformer.ops.family.table import lookup
from tests.ops.inputs import (
    NAMES,
    every_attention,
    make,
    number_options,
    tensor_option_names,
    tensor_options,
)
from tests.ops.oracles import ORACLES, Numbers, Row


def test_every_row_has_an_oracle_and_every_oracle_a_row() -> None:
    assert set(ORACLES) == set(ATTENTIONS)


def test_the_family_is_complete() -> None:
    promised = {"relu", "softmax", "sparsemax", "entmax15", "rela", "sigmoid"}
    assert promised <= set(ATTENTIONS)
    assert len(ATTENTIONS) >= 30


@every_attention
def test_rows_describe_themselves(name: str) -> None:
    row = ATTENTIONS[name]
    assert row.formula and row.paper
    assert (row.weigh is None) != (row.rule is None)
    assert set(row.learned) <= row.options
    assert set(row.learned) <= set(tensor_option_names(row))
    assert set(row.learned.values()) <= {"head", "width", "pair", "token"}


def test_names_are_unique() -> None:
    # A second row of the same name would replace the first in the dictionary.
    assert len(table._ROWS) == len(ATTENTIONS)


def test_options_never_hide_the_shared_arguments() -> None:
    shared = set(inspect.signature(attention).parameters)
    for row in ATTENTIONS.values():
        assert not row.options & shared, row.name


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"unknown attention 'reul'; known: .*relu, .*softmax"):
        lookup("reul")


@every_attention
@pytest.mark.parametrize("kind", ["defaults", "tensors", "numbers"])
def test_weights_and_outputs_follow_the_formula(name: str, kind: str) -> None:
    q, k, v = make()
    options: dict[str, Any] = {} if kind == "defaults" else dict(tensor_options(name, q, v))
    if kind == "numbers":
        options |= number_options(name)
    visible = torch.rand(2, 4, 3, 5) > 0.3
    visible[0, :, 1] = False
    bias = 0.3 * torch.randn(3, 5, dtype=q.dtype)
    result = attention(
        name, q, k, v, mask=visible, bias=bias, impl="reference", return_weights=True, **options
    )
    weights, output = _naive(name, q, k, v, visible, bias, options)
    torch.testing.assert_close(result.weights, weights, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(result.output, output, rtol=1e-8, atol=1e-10)


def _naive(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    bias: Tensor,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Weights and output, token by token, head by head and key by key, with the oracle."""
    row, oracle = ATTENTIONS[name], ORACLES[name]
    (batch, heads, rows, _), (_, kv_heads, keys, width_v) = q.shape, v.shape
    weights = torch.zeros(batch, heads, rows, keys, dtype=q.dtype)
    output = torch.zeros(batch, heads, rows, width_v, dtype=q.dtype)
    finishing = {"gain", "gate", "lam_init"}
    for b in range(batch):
        for i in range(rows):
            tokens = []
            for h in range(heads):
                g = h // (heads // kv_heads)
                seen = [j for j in range(keys) if visible[b, h, i, j]]
                maps = [
                    [_naive_score(row.cosine, *pair) + float(bias[i, j]) for j, pair in pairs]
                    for pairs in _score_pairs(row.halves, q[b, h, i], k[b, g], seen)
                ]
                width = q.shape[3] // len(maps)
                given = {o: _for_head(x, h) for o, x in options.items() if o not in finishing}
                if seen:
                    second = maps[1] if row.halves else None
                    found = oracle.weigh(Row(maps[0], width, second), **given)
                    weights[b, h, i, seen] = torch.tensor(found, dtype=q.dtype)
                tokens.append((weights[b, h, i, :, None] * v[b, g]).sum(dim=0).tolist())
            if oracle.output_transform is not None:
                given = {o: x for o, x in options.items() if o in finishing}
                for o, x in given.items():
                    token = row.learned.get(o) == "token"
                    given[o] = (x[b, :, i] if token else x).tolist() if torch.is_tensor(x) else x
                tokens = oracle.output_transform(tokens, **given)
            output[b, :, i] = torch.tensor(tokens, dtype=q.dtype)
    return weights, output


def _score_pairs(
    halves: bool, q: Tensor, k: Tensor, seen: list[int]
) -> list[list[tuple[int, tuple[Numbers, Numbers]]]]:
    """(j, (query, key)) of every visible key, once for the whole width or once for each half."""
    middle = len(q) // 2
    parts = [slice(None, middle), slice(middle, None)] if halves else [slice(None)]
    return [[(j, (q[part].tolist(), k[j][part].tolist())) for j in seen] for part in parts]


def _naive_score(cosine: bool, query: Numbers, key: Numbers) -> float:
    dot = sum(a * b for a, b in zip(query, key, strict=True))
    if cosine:
        return dot / math.sqrt(sum(a * a for a in query)) / math.sqrt(sum(b * b for b in key))
    return dot / math.sqrt(len(query))


def _for_head(value: Any, h: int) -> Any:
    """An option as head h meets it: its own number of [H], all of anything else."""
    if not torch.is_tensor(value):
        return value
    return value.tolist() if len(value) == 2 else float(value[h])


@every_attention
def test_gradients_match_finite_differences(name: str) -> None:
    sizes = {"batch": 1, "heads": 2, "kv_heads": 1, "rows": 2, "keys": 4, "value_width": 2}
    q, k, v = make(**sizes, width=6, seed=3, requires_grad=True)
    bias = (0.1 * torch.randn(2, 4, dtype=q.dtype)).requires_grad_()
    options = tensor_options(name, q, v, requires_grad=True)
    names = list(options)
    mask = torch.tensor([[True, True, False, True], [True] * 4])

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *given: Tensor) -> Tensor:
        learned = dict(zip(names, given, strict=True))
        return attention(name, q, k, v, mask=mask, bias=bias, impl="reference", **learned)

    assert run(q, k, v, bias, *options.values()).abs().max() > 0
    assert torch.autograd.gradcheck(run, (q, k, v, bias, *options.values()))


@pytest.mark.parametrize("name", [name for name in NAMES if tensor_option_names(ATTENTIONS[name])])
def test_gradients_reach_every_tensor_option(name: str) -> None:
    q, k, v = make(keys=12)
    options = tensor_options(name, q, v, requires_grad=True)
    output = attention(name, q, k, v, causal=True, impl="reference", **options)
    for option, grad in zip(
        options, torch.autograd.grad(output.square().sum(), list(options.values())), strict=True
    ):
        assert grad.isfinite().all() and grad.abs().max() > 0, option


@pytest.mark.parametrize("name", [name for name in NAMES if ORACLES[name].total is not None])
def test_normalised_rows_sum_to_one(name: str) -> None:
    q, k, v = make(rows=7, keys=7, dtype=torch.float32)
    for scale in (0.1, 1.0, 30.0):
        stats = attention(name, q, k, v, causal=True, scale=scale, return_stats=True).stats
        live = stats.row_sum[stats.row_sum > 0]
        assert len(live) == stats.row_sum.numel()
        torch.testing.assert_close(live, torch.ones_like(live), rtol=0, atol=2e-6)
