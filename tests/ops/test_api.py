"""The public functions: what they return, and that both say the same."""

import inspect

import pytest
import torch

import reluformer
from reluformer import ATTENTIONS, AttentionResult, Stats, attention, relu_attention
from reluformer.errors import UserError
from reluformer.ops.api import attend
from reluformer.ops.call import Call
from reluformer.ops.visibility import Visibility
from tests.ops.inputs import assert_same, every_attention, make, tensor_options


def test_the_example_of_four_lines() -> None:
    q, k, v = (torch.randn(1, 8, 16, 64) for _ in range(3))
    assert reluformer.relu_attention(q, k, v, causal=True).shape == (1, 8, 16, 64)


@every_attention
def test_extras_come_only_when_asked_for(name: str) -> None:
    q, k, v = make()
    plain = attention(name, q, k, v, impl="reference")
    assert isinstance(plain, torch.Tensor) and plain.shape == (2, 4, 3, 6)
    for weights, stats in ((True, False), (False, True), (True, True)):
        result = attention(
            name, q, k, v, impl="reference", return_weights=weights, return_stats=stats
        )
        assert isinstance(result, AttentionResult)
        assert_same(result.output, plain)
        assert (result.weights is not None) is weights
        assert (result.stats is not None) is stats
    assert isinstance(result.stats, Stats)
    assert result.weights.shape == (2, 4, 3, 5)
    assert all(field.shape == (2, 4, 3) for field in result.stats)


@every_attention
def test_attend_runs_a_row_of_the_table_like_the_function(name: str) -> None:
    q, k, v = make()
    options = tensor_options(name, q, v)
    row = ATTENTIONS[name]
    call = Call(q, k, v, Visibility(causal=True), row.default_scale(q.shape[-1]))
    result = attend(row, call, options)
    assert_same(result.output, attention(name, q, k, v, causal=True, **options))
    assert result.weights is None and result.stats is None and result.sums is None


@every_attention
def test_weights_are_those_before_norm_and_gate(name: str) -> None:
    q, k, v = make()
    row, options = ATTENTIONS[name], tensor_options(name, q, v)
    result = attention(name, q, k, v, return_weights=True, **options)
    read = result.weights @ v.repeat_interleave(2, dim=1)
    torch.testing.assert_close(row.transform_output(read, options), result.output)


def test_relu_attention_is_the_relu_row() -> None:
    q, k, v = make()
    arguments = {
        "mask": torch.rand(3, 5) > 0.3,
        "causal": True,
        "key_lengths": torch.tensor([5, 4]),
        "window": 3,
        "scale": 0.4,
        "bias": torch.randn(5, dtype=q.dtype),
        "gamma": torch.rand(4, dtype=q.dtype) + 0.5,
        "length_exponent": 0.7,
        "power": 2,
        "threshold": -0.2,
        "negative_slope": 0.1,
        "return_weights": True,
        "return_stats": True,
        "check": True,
    }
    ours, row = relu_attention(q, k, v, **arguments), attention("relu", q, k, v, **arguments)
    assert_same(ours.output, row.output)
    assert_same(ours.weights, row.weights)
    assert_same(tuple(ours.stats), tuple(row.stats))


def test_relu_attention_spells_out_every_argument_and_its_default() -> None:
    spelled = inspect.signature(relu_attention).parameters
    shared = inspect.signature(attention).parameters
    expected = {name: p.default for name, p in shared.items() if name not in ("name", "options")}
    rule = inspect.signature(ATTENTIONS["relu"].rule).parameters
    expected |= {name: p.default for name, p in rule.items()}
    assert {name: p.default for name, p in spelled.items()} == expected


def test_every_shared_argument_is_documented() -> None:
    for name in inspect.signature(attention).parameters:
        assert f"        {name}: " in attention.__doc__ or f"**{name}: " in attention.__doc__, name
    for name in ATTENTIONS["relu"].options:
        assert f"        {name}: " in relu_attention.__doc__, name


def test_relu_attention_refuses_what_it_does_not_know() -> None:
    with pytest.raises(TypeError, match="is_causal"):
        relu_attention(*make(), is_causal=True)
    with pytest.raises(UserError, match="unknown attention 'gelu'"):
        attention("gelu", *make())
    with pytest.raises(ValueError, match="gamma must be a finite number greater than 0, got 0"):
        relu_attention(*make(), gamma=0)
