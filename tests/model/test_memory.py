"""Global memories: every kind against its formula, and properties of all kinds."""

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from reluformer import attention
from reluformer.model.memories.dense import AllSlots
from reluformer.model.memories.experts import Experts
from reluformer.model.memories.product_keys import ProductKeys
from reluformer.model.memory import MEMORIES, KeyValueMemory
from reluformer.ops.api import attend
from reluformer.ops.call import Call
from reluformer.ops.definition import Attention
from reluformer.ops.visibility import Visibility
from tests.model.memories.kinds import KINDS, ORACLES, every_kind, make, oracle, takes_bias

HOMOGENEOUS = {"relu", "reglu", "top_k", "product_key_relu", "sigma_moe"}
"""Kinds that do not change under (K c, V / c); squared ReLU scales by c, the others change."""


def queries(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, 6, dtype=dtype)


def parameters(memory: KeyValueMemory) -> dict[str, Tensor]:
    return dict(memory.named_parameters())


def test_every_kind_has_an_oracle() -> None:
    assert set(ORACLES) == set(KINDS)


@pytest.mark.parametrize(
    ("kind", "bias"), [(kind, bias) for kind in KINDS for bias in {False, takes_bias(kind)}]
)
def test_matches_the_literal_formula(kind: str, bias: bool) -> None:
    memory, x = make(kind, bias=bias), queries(7)
    torch.testing.assert_close(memory(x), oracle(memory, x))


@every_kind
def test_gradients(kind: str) -> None:
    memory = make(kind, bias=takes_bias(kind))
    names, tensors = zip(*parameters(memory).items(), strict=True)

    def run(x: Tensor, *tensors: Tensor) -> Any:
        given = dict(zip(names, tensors, strict=True))
        return torch.func.functional_call(memory, given, (x,))

    assert torch.autograd.gradcheck(run, (queries(3).requires_grad_(), *tensors))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if takes_bias(kind)])
def test_biases_can_be_given_from_outside(kind: str) -> None:
    memory, x = make(kind, bias=True), torch.randn(5, 6).double()
    given = {name: each.detach() + 0 for name, each in make(kind, bias=True).named_parameters()}
    found = torch.func.functional_call(memory, given, (x,))
    memory.load_state_dict(given)
    torch.testing.assert_close(found, memory(x))


@every_kind
def test_any_leading_shape(kind: str) -> None:
    memory, x = make(kind), queries(2, 3)
    expected = memory(x)
    slots = (2, 16) if kind == "persistent" else (16,)
    for shape in ((6,), (1, 6), (6, 1), (2, 3)):
        given = x.reshape(*shape, 6)
        result = memory(given, return_weights=True)
        torch.testing.assert_close(result.output, expected.reshape(given.shape))
        assert result.weights.shape == (*shape, *slots)
    torch.testing.assert_close(memory(x[0, 0]), expected[0, 0])
    assert memory(x[0, 0], return_weights=True).weights.shape == slots
    for shape in ((0,), (2, 0), (0, 3)):
        empty = queries(*shape).requires_grad_()
        memory(empty).sum().backward()
        assert memory(empty).shape == empty.shape
        assert memory(empty, return_weights=True).weights.shape == (*shape, *slots)
        assert all(not p.grad.any() for p in memory.parameters() if p.grad is not None)


@every_kind
def test_weights_times_values_is_the_output(kind: str) -> None:
    memory, x = make(kind), queries(5)
    output, weights = memory(x, return_weights=True)
    if kind == "persistent":
        expected = torch.einsum("nhs,hsd->nhd", weights, memory.values).flatten(1)
    else:
        expected = weights @ memory.values
    if memory.finish is not None:
        expected = memory.finish(expected)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(memory(x), expected)


@every_kind
def test_results_do_not_depend_on_the_rest_of_the_batch(kind: str) -> None:
    memory, x = make(kind), queries(5)
    alone = memory(x[2:3])
    x[3:] = 100.0
    torch.testing.assert_close(memory(x)[2:3], alone)


@pytest.mark.parametrize(
    ("kind", "name", "options"),
    [
        ("relu", "relu", {"length_exponent": 0.0}),
        ("squared_relu", "relu", {"length_exponent": 0.0, "power": 2}),
        ("softmax", "softmax", {}),
    ],
)
def test_memory_is_attention_to_its_parameters(kind: str, name: str, options: Any) -> None:
    memory, x = make(kind), queries(5)
    q, k, v = (tensor[None, None] for tensor in (x, memory.keys, memory.values))
    attended = attention(name, q, k, v, scale=1.0, **options)
    torch.testing.assert_close(memory(x), attended[0, 0])


@pytest.mark.parametrize(
    "kind", [k for k in KINDS if MEMORIES[k].selector is AllSlots and not MEMORIES[k].gate]
)
def test_weight_functions_are_those_of_attention(kind: str) -> None:
    """The row's own weight function, run by the attention machinery on the memory's tables."""
    memory, x = make(kind, bias=True), queries(5)
    row = Attention(kind, "", "", weigh=MEMORIES[kind].weigh)
    q, k, v = (tensor[None, None] for tensor in (x, memory.keys, memory.values))
    call = Call(q, k, v, Visibility(), scale=1.0, bias=memory.get_parameter("keys_bias"))
    expected = attend(row, call, {}).output[0, 0] + memory.get_parameter("values_bias")
    expected = expected if memory.finish is None else memory.finish(expected)
    torch.testing.assert_close(memory(x), expected)


@pytest.mark.parametrize("bias", [False, True])
def test_relu_memory_is_the_feed_forward_layer(bias: bool) -> None:
    memory, x = make("relu", bias=bias), queries(2, 5)
    layer = nn.Sequential(nn.Linear(6, 16, bias=bias), nn.ReLU(), nn.Linear(16, 6, bias=bias))
    layer.double().requires_grad_(False)
    for name, linear, transpose in (("keys", layer[0], False), ("values", layer[2], True)):
        table = memory.get_parameter(name)
        linear.weight.copy_(table.T if transpose else table)
        if bias:
            linear.bias.copy_(memory.get_parameter(f"{name}_bias"))
    torch.testing.assert_close(memory(x), layer(x))


@every_kind
def test_scaling_keys_up_and_values_down(kind: str) -> None:
    memory, x = make(kind), queries(5)
    before = memory(x)
    with torch.no_grad():
        memory.keys.mul_(3.0)
        memory.values.div_(3.0)
    unchanged = torch.allclose(memory(x), before)
    assert unchanged == (kind in HOMOGENEOUS)
    if kind == "squared_relu":
        torch.testing.assert_close(memory(x), 3 * before)


@pytest.mark.parametrize(
    "kind", [k for k in KINDS if MEMORIES[k].selector not in (Experts, ProductKeys)]
)
def test_results_do_not_depend_on_the_order_of_slots(kind: str) -> None:
    memory, x = make(kind, bias=takes_bias(kind)), queries(5)
    before, order = memory(x), torch.randperm(16)
    with torch.no_grad():
        for name, parameter in parameters(memory).items():
            slots = [d for d, length in enumerate(parameter.shape) if length == 16]
            if slots and name != "values_bias":
                parameter.copy_(parameter.index_select(slots[0], order))
    torch.testing.assert_close(memory(x), before)


@pytest.mark.parametrize("slots", [256, 1024])
def test_output_variance_follows_the_theory(slots: int) -> None:
    """Unit-variance scores and values: n/2 for ReLU, e/n for softmax, 1 after LayerNorm."""
    x = torch.randn(2000, 256)
    for kind, expected in (("relu", slots / 2), ("softmax", math.e / slots), ("softmax_ln", 1.0)):
        memory = KeyValueMemory(256, slots, kind)
        nn.init.normal_(memory.values)
        assert memory(x).var().item() == pytest.approx(expected, rel=0.1)


@every_kind
def test_every_kind_starts_with_a_useful_output(kind: str) -> None:
    """At the start the branch is neither lost beside unit-variance x nor drowns it."""
    memory, x = KeyValueMemory(64, 1024, kind), torch.randn(200, 64)
    output = memory(x)
    # The smallest: softmax over 1024 slots, sqrt(e/1024) = 0.05.
    assert 0.04 < output.std().item() < 5
    (output * torch.randn_like(output)).sum().backward()
    for name, parameter in parameters(memory).items():
        assert parameter.grad is not None and parameter.grad.norm() > 1e-3, name


@every_kind
def test_huge_inputs_give_finite_outputs(kind: str) -> None:
    memory = make(kind, dtype=torch.float32)
    for x in (1e4 * queries(5, dtype=torch.float32), torch.zeros(5, 6)):
        x.requires_grad_()
        output = memory(x)
        gradients = torch.autograd.grad(output.sum(), [x, *memory.parameters()])
        assert all(torch.isfinite(tensor).all() for tensor in (output, *gradients))


@every_kind
def test_half_precision_and_autocast(kind: str) -> None:
    memory, x = make(kind, 64, 256, torch.float32), torch.randn(50, 64)
    expected = memory(x)
    with torch.autocast("cpu", torch.bfloat16):
        cast = memory(x)
        cast.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in memory.parameters())
    half = memory.bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16
    for actual in (cast, half):
        # The median row, because rounding can change the selection of a row with a near tie.
        error = (actual.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error.median() < 0.01


@pytest.mark.parametrize("kind", ["softmax", "softmax_ln", "persistent"])
def test_normalised_weights_are_exact_under_autocast(kind: str) -> None:
    """Rounded to bfloat16, the weights of 1024 slots would miss a sum of 1 by about 1e-3."""
    memory, x = KeyValueMemory(64, 1024, kind), torch.randn(50, 64)
    with torch.autocast("cpu", torch.bfloat16):
        sums = memory(x, return_weights=True).weights.sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=1e-5)


@every_kind
def test_compiles_without_graph_breaks(kind: str) -> None:
    memory, x = make(kind, bias=takes_bias(kind)), queries(5).requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(memory, fullgraph=True, backend="aot_eager")
    inputs = [x, *memory.parameters()]
    actual, expected = compiled(x), memory(x)
    torch.testing.assert_close(actual, expected)
    probe = torch.randn_like(expected)
    pair = (torch.autograd.grad((output * probe).sum(), inputs) for output in (actual, expected))
    torch.testing.assert_close(*pair)


@every_kind
def test_dropout_acts_in_training_only(kind: str) -> None:
    memory, x = make(kind, dropout=0.5), queries(50)
    plain = make(kind)
    plain.load_state_dict(memory.state_dict())
    assert not torch.allclose(memory(x), plain(x))
    torch.testing.assert_close(memory(x, return_weights=True).weights, plain(x, True).weights)
    torch.testing.assert_close(memory.eval()(x), plain(x))


def test_dropout_keeps_the_mean() -> None:
    memory = make("relu", dropout=0.5)
    x = queries(1).expand(20_000, 6)
    drawn = memory(x)
    standard_error = drawn.std(0) / math.sqrt(len(x))
    assert ((drawn.mean(0) - memory.eval()(x[:1])[0]).abs() < 5 * standard_error).all()


@every_kind
def test_parameter_count(kind: str) -> None:
    w, n, heads, experts = 6, 16, 2, 4
    both = 2 * w * n
    product = heads * (w * w + w * 4) + w * n
    special = {"reglu": both + w * n, "swiglu": both + w * n, "softmax_ln": both + 2 * w}
    special |= {"sigma_moe": both + w * experts}
    special |= {"product_key_relu": product, "product_key_softmax": product}
    count = sum(parameter.numel() for parameter in make(kind).parameters())
    assert count == special.get(kind, both)


@every_kind
def test_copies_and_state_dicts(kind: str) -> None:
    memory, x = make(kind), queries(5)
    for twin in (copy.deepcopy(memory), pickle.loads(pickle.dumps(memory))):
        torch.testing.assert_close(twin(x), memory(x))
    assert {"keys", "values"} <= set(memory.state_dict())
    assert f"width=6, slots=16, kind={kind}" in repr(memory)


def test_autocast_does_not_widen_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, x = KeyValueMemory(8, 16), torch.randn(5, 8)
    widened: list[tuple[torch.dtype, ...]] = []
    convert = torch.Tensor.to

    def spy(tensor: torch.Tensor, *given: Any, **options: Any) -> torch.Tensor:
        converted = convert(tensor, *given, **options)
        widened.append((tensor.dtype, converted.dtype))
        return converted

    monkeypatch.setattr(torch.Tensor, "to", spy)
    with torch.autocast("cpu", torch.bfloat16):
        result = memory(x, return_weights=True)
    assert result.weights.dtype == result.output.dtype == torch.bfloat16
    assert (torch.bfloat16, torch.float32) not in widened


@pytest.mark.parametrize("kind", ["relu", "softmax", "softmax_ln"])
def test_values_of_all_kinds_can_start_alike(kind: str) -> None:
    torch.manual_seed(0)
    memory = KeyValueMemory(64, 256, kind, value_std=0.25)
    assert memory.values.std().item() == pytest.approx(0.25, rel=0.05)
    assert memory.keys.std().item() == pytest.approx(0.125, rel=0.05)
    assert "value_std=0.25" in repr(memory)
    initial = KeyValueMemory(64, 256, kind).values.std().item()
    assert initial == pytest.approx(256**-0.5 if kind == "relu" else 1.0, rel=0.05)
