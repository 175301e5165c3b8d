"""Memories that select slots: the selection is exact, and the rest equals a dense memory."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from reluformer import attention
from reluformer.errors import UserError
from reluformer.model.losses import expert_balance_loss
from reluformer.model.memories.definition import Query
from reluformer.model.memories.product_keys import ProductKeys
from reluformer.model.memory import KeyValueMemory
from reluformer.ops.memory import Scores, read
from tests.model.memories.kinds import KINDS, make, product_key_scores, relu, scores


def queries(*shape: int) -> Tensor:
    return torch.randn(*shape, 6, dtype=torch.float64)


def gradients(output: Tensor, memory: KeyValueMemory, x: Tensor) -> list[Tensor]:
    probe = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
    return list(torch.autograd.grad((output * probe).sum(), [x, *memory.parameters()]))


def test_top_k_of_all_slots_is_relu() -> None:
    memory, dense, x = make("top_k", k=16), make("relu"), queries(7)
    dense.load_state_dict(memory.state_dict())
    torch.testing.assert_close(memory(x), dense(x))


def test_top_k_by_value_takes_the_largest_terms() -> None:
    memory, x = make("top_k", k=4, rank_by_value=True), queries(7)
    with torch.no_grad():
        memory.values.mul_(torch.linspace(0.1, 10, 16).double().unsqueeze(-1))
    terms = relu(scores(memory, x)).unsqueeze(-1) * memory.values
    largest = terms.norm(dim=-1).topk(4, dim=-1).indices
    expected = torch.stack([row[slots].sum(0) for row, slots in zip(terms, largest, strict=True)])
    torch.testing.assert_close(memory(x), expected)
    weights = memory(x, return_weights=True).weights
    assert ((weights > 0).sum(-1) <= 4).all()


@given(
    root=st.integers(1, 7),
    share=st.floats(0, 1),
    heads=st.integers(1, 3),
    half=st.integers(1, 4),
    seed=st.integers(0, 10_000),
)
def test_product_key_selection_is_exact(
    root: int, share: float, heads: int, half: int, seed: int
) -> None:
    torch.manual_seed(seed)
    k = 1 + round(share * (root * root - 1))
    memory = make("product_key_relu", 2 * half, root * root, k=k, heads=heads)
    x = torch.randn(4, 2 * half, dtype=torch.float64)
    selector = memory.selector
    assert isinstance(selector, ProductKeys)
    query = Query(x, dict(memory.named_parameters()), memory.spec.weights)
    found, slots = selector.select(query)
    for head, everything in enumerate(product_key_scores(memory, x)):
        expected = everything.topk(k, dim=-1)
        torch.testing.assert_close(found[:, head], expected.values)
        torch.testing.assert_close(everything.gather(-1, slots[:, head]), expected.values)
        assert all(len(set(row)) == k for row in slots[:, head].tolist())


@pytest.mark.parametrize("kind", ["product_key_relu", "product_key_softmax"])
def test_product_keys_equal_the_definition(kind: str) -> None:
    memory, x = make(kind), queries(5)
    selector = memory.selector
    assert isinstance(selector, ProductKeys)
    best, slots = selector.select(Query(x, dict(memory.named_parameters()), memory.spec.weights))
    chosen = Scores(best.unsqueeze(-2), None, 6)
    by_head, _ = read(chosen, memory.values[slots], memory.spec.weights)
    torch.testing.assert_close(memory(x), by_head.sum(dim=(1, 2)))


def test_all_experts_are_the_dense_sum() -> None:
    memory, x = make("sigma_moe", k=4), queries(7)
    gates = torch.sigmoid(x @ memory.get_parameter("experts").T).repeat_interleave(4, dim=-1)
    expected = (gates * relu(scores(memory, x))) @ memory.values
    torch.testing.assert_close(memory(x), expected)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_grouped_experts_equal_hidden_experts(k: int, bias: bool) -> None:
    memory, x = make("sigma_moe", k=k, bias=bias), queries(9).requires_grad_()
    # One expert that no query chooses: its group is empty.
    with torch.no_grad():
        memory.get_parameter("experts")[1] = -50 * x.sum(0) / x.sum(0).norm()
    grouped, hidden = memory(x), memory(x, return_weights=True).output
    torch.testing.assert_close(grouped, hidden)
    torch.testing.assert_close(gradients(grouped, memory, x), gradients(hidden, memory, x))


def test_rows_of_the_expert_table_start_with_one_norm() -> None:
    experts = KeyValueMemory(64, 64, "sigma_moe").get_parameter("experts")
    torch.testing.assert_close(experts.norm(dim=-1), torch.ones(16))


def test_expert_dropout() -> None:
    memory, x = make("sigma_moe", expert_dropout=0.5), queries(2000)
    plain = make("sigma_moe")
    plain.load_state_dict(memory.state_dict())
    used, free = (
        m(x, return_weights=True).weights.view(2000, 4, 4).any(-1) for m in (memory, plain)
    )
    best = (x @ memory.get_parameter("experts").T).argmax(-1, keepdim=True)
    rate = used.gather(-1, best).sum() / free.gather(-1, best).sum()
    assert rate.item() == pytest.approx(0.5, abs=0.06)
    assert (used.sum(-1) <= 2).all()
    torch.testing.assert_close(memory.eval()(x), plain(x))


def test_a_query_without_experts_has_output_zero() -> None:
    memory, x = make("sigma_moe", expert_dropout=1 - 1e-12), queries(5).requires_grad_()
    for output in (memory(x), memory(x, return_weights=True).output):
        assert not output.any()
        assert all(not gradient.any() for gradient in gradients(output, memory, x))


def test_expert_balance_is_the_negative_entropy_of_the_mean_choice() -> None:
    memory, x = make("sigma_moe"), queries(2, 5)
    logits = x.view(10, 6) @ memory.get_parameter("experts").T
    mean = (logits.exp() / logits.exp().sum(-1, keepdim=True)).mean(0)
    torch.testing.assert_close(balance(memory, x), (mean * mean.log()).sum())
    with torch.no_grad():
        memory.get_parameter("experts").zero_()
    assert balance(memory, x).item() == pytest.approx(-math.log(4))
    assert balance(memory, x[:0]).item() == 0


def test_expert_choices_exclude_padding() -> None:
    memory, x = make("sigma_moe"), queries(2, 5)
    choices = memory.expert_choices(x, torch.tensor([5, 2]))
    assert choices is not None
    torch.testing.assert_close(choices.sum(-1), torch.tensor([5.0, 2.0]).to(x))
    torch.testing.assert_close(choices[1:], memory.expert_choices(x[1:, :2]))


def test_expert_balance_has_the_gradient_of_its_formula() -> None:
    memory, x = make("sigma_moe"), queries(2, 5)
    experts = memory.get_parameter("experts")
    mean = (x.view(10, 6) @ experts.T).softmax(-1).mean(0)
    [wanted] = torch.autograd.grad((mean * mean.log()).sum(), experts)
    [result] = torch.autograd.grad(balance(memory, x), experts)
    torch.testing.assert_close(result, wanted)


def test_expert_balance_adds_up_over_processes() -> None:
    memory, x = make("sigma_moe"), queries(4, 5)
    experts = memory.get_parameter("experts")
    [whole] = torch.autograd.grad(balance(memory, x), experts)
    parts = [memory.expert_choices(part) for part in (x[:1], x[1:])]
    choices = [part.sum(0, keepdim=True) for part in parts if part is not None]
    losses = [expert_balance_loss(part, choices[0] + choices[1]) for part in choices]
    torch.testing.assert_close(losses[0] + losses[1], balance(memory, x))
    [gradient] = torch.autograd.grad(losses[0] + losses[1], experts)
    torch.testing.assert_close(gradient, whole)


def test_expert_balance_spreads_the_choice() -> None:
    memory, x = make("sigma_moe"), queries(1, 64)
    optimiser = torch.optim.Adam([memory.get_parameter("experts")], lr=0.05)
    with torch.no_grad():
        centre = x.mean((0, 1))
        memory.get_parameter("experts")[0] = 3 * centre / centre.norm() ** 2
    before = balance(memory, x).item() + math.log(4)
    for _ in range(50):
        optimiser.zero_grad()
        balance(memory, x).backward()
        optimiser.step()
    assert 0 <= balance(memory, x).item() + math.log(4) < before / 4


def balance(memory: KeyValueMemory, x: Tensor) -> Tensor:
    choices = memory.expert_choices(x)
    assert choices is not None
    return expert_balance_loss(choices.sum(dim=0, keepdim=True))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "sigma_moe"])
def test_other_kinds_have_no_experts(kind: str) -> None:
    assert make(kind).expert_choices(queries(2, 5)) is None


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_extended_attention_is_one_softmax(causal: bool, kv_heads: int) -> None:
    """Rows, padding and causality written out with loops, against attention to the extension."""
    memory = make("persistent", width=12, slots=4, heads=4)
    q = torch.randn(2, 4, 5, 3, dtype=torch.float64)
    k, v = torch.randn(2, 2, kv_heads, 5, 3, dtype=torch.float64)
    lengths = torch.tensor([5, 3])
    keys, values = memory.extend(k, v)
    assert keys.shape == values.shape == (2, 4, 9, 3)
    actual = attention("softmax", q, keys, values, causal=causal, key_lengths=lengths + 4)
    for b in range(2):
        for h in range(4):
            group = h * kv_heads // 4
            for i in range(5):
                seen = [j for j in range(lengths[b]) if not causal or j <= i]
                all_keys = torch.cat((memory.keys[h], k[b, group, seen]))
                all_values = torch.cat((memory.values[h], v[b, group, seen]))
                weights = torch.softmax(all_keys @ q[b, h, i] / math.sqrt(3), dim=0)
                torch.testing.assert_close(actual[b, h, i], weights @ all_values)


def test_extending_an_empty_context_equals_the_memory_alone() -> None:
    memory, x = make("persistent"), queries(5)
    nothing = torch.empty(1, 2, 0, 3, dtype=torch.float64)
    q = x.view(1, 5, 2, 3).transpose(1, 2)
    attended = attention("softmax", q, *memory.extend(nothing, nothing))
    torch.testing.assert_close(attended.transpose(1, 2).reshape(5, 6), memory(x))


def test_extension_takes_the_dtype_of_the_context() -> None:
    memory = make("persistent", dtype=torch.float32)
    context = torch.randn(2, 2, 5, 3).bfloat16()
    assert all(tensor.dtype == torch.bfloat16 for tensor in memory.extend(context, context))


@pytest.mark.parametrize(
    ("kind", "shape", "said"),
    [
        ("relu", (2, 2, 5, 3), "kind must be persistent to extend an attention, got 'relu'"),
        ("persistent", (2, 2, 5, 4), "k must be [B, heads, T, 3], got [2, 2, 5, 4]"),
        ("persistent", (2, 3, 5, 3), "k's heads must divide the memory's 2 heads, got 3"),
    ],
)
def test_extend_refuses_invalid_contexts(kind: str, shape: Any, said: str) -> None:
    context = torch.randn(shape)
    with pytest.raises(UserError) as error:
        make(kind, dtype=torch.float32).extend(context, context)
    assert said in str(error.value)
