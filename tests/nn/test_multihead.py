"""`MultiheadAttention` against torch's own with softmax, and its promises with ReLU."""

import copy
import inspect
import io
import pickle
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from reluformer.errors import UserError
from reluformer.nn import MultiheadAttention
from tests.ops.inputs import assert_same

WIDTH = 12
KINDS = ("normalised_relu", "relu", "softmax", "entmax15", "sigmoid")


class Case(NamedTuple):
    """A random layer and input."""

    layer: dict[str, Any]
    rows: int
    keys: int
    batch: int | None
    """None for unbatched input."""
    same: str
    """"self" passes one tensor three times, "memory" one tensor as key and value."""
    attn_mask: str
    padding: str
    call: dict[str, Any]
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    same = draw(st.sampled_from(["self", "memory", "none"]))
    layer: dict[str, Any] = {
        "num_heads": draw(st.sampled_from([1, 2, 3, 4])),
        "bias": draw(st.booleans()),
        "batch_first": draw(st.booleans()),
        "add_bias_kv": draw(st.booleans()),
        "add_zero_attn": draw(st.booleans()),
    }
    if same == "none":
        layer |= {
            "kdim": draw(st.sampled_from([None, 5])),
            "vdim": draw(st.sampled_from([None, 7])),
        }
    rows = draw(st.integers(1, 6))
    return Case(
        layer,
        rows,
        keys=rows if same == "self" else draw(st.integers(1, 6)),
        batch=draw(st.sampled_from([None, 1, 3])),
        same=same,
        attn_mask=draw(st.sampled_from(["none", "bool", "float", "causal", "per head"])),
        padding=draw(st.sampled_from(["none", "right", "left", "float"])),
        call={"need_weights": draw(st.booleans()), "average_attn_weights": draw(st.booleans())},
        seed=draw(st.integers(0, 1000)),
    )


def inputs_of(case: Case) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """Query, key and value of a case, and its masks."""
    generator = torch.Generator().manual_seed(case.seed)

    def random(length: int, width: int | None) -> Tensor:
        shape = (length, width or WIDTH)
        if case.batch is not None:
            first = case.layer["batch_first"]
            shape = (case.batch, *shape) if first else (length, case.batch, width or WIDTH)
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    query = random(case.rows, WIDTH)
    key = query if case.same == "self" else random(case.keys, case.layer.get("kdim"))
    value = random(case.keys, case.layer.get("vdim")) if case.same == "none" else key
    batch, heads = case.batch or 1, case.layer["num_heads"]
    table = torch.rand(case.rows, case.keys, generator=generator) > 0.6
    # torch gives NaN for rows that see nothing; ours are tested below.
    table[:, 0] = False
    bias = torch.randn(table.shape, generator=generator, dtype=torch.float64)
    causal = torch.ones(case.rows, case.keys, dtype=torch.bool).triu(1)
    attn_mask = {
        "none": None,
        "bool": table,
        "float": bias.masked_fill(table, -torch.inf),
        "causal": torch.zeros_like(bias).masked_fill(causal, -torch.inf),
        "per head": table.repeat(batch * heads, 1, 1),
    }[case.attn_mask]
    position = torch.arange(case.keys)
    lengths = torch.randint(1, case.keys + 1, (batch, 1), generator=generator)
    right = position >= lengths
    shift = torch.randn(right.shape, generator=generator, dtype=torch.float64)
    left = (position >= 1) & (position < lengths)
    padding = {
        "none": None,
        "right": right,
        "left": left,
        "float": shift.masked_fill(right, -torch.inf),
    }[case.padding]
    if padding is not None and case.batch is None:
        padding = padding[0]
    return [query, key, value], {"attn_mask": attn_mask, "key_padding_mask": padding}


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("mode", ["train", "eval", "inference"])
@given(case=cases())
def test_softmax_agrees_with_torch(mode: str, case: Case) -> None:
    torch.manual_seed(case.seed)
    theirs = nn.MultiheadAttention(WIDTH, **case.layer, dtype=torch.float64)
    torch.manual_seed(case.seed)
    ours = MultiheadAttention(WIDTH, **case.layer, dtype=torch.float64, attention="softmax")
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert_same(ours.state_dict(), theirs.state_dict())
    inputs, masks = inputs_of(case)
    outputs = []
    for layer in (theirs, ours):
        layer.train(mode == "train")
        with torch.inference_mode(mode == "inference"):
            output, weights = layer(*inputs, **masks, **case.call)
        result = [output.clone()] if weights is None else [output.clone(), weights.clone()]
        if mode != "inference":
            total = sum((each * each.detach().cos()).sum() for each in result)
            leaves = [*{id(each): each for each in inputs}.values(), *layer.parameters()]
            result += torch.autograd.grad(total, leaves)
        outputs.append(result)
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_causal_hint_agrees_with_torch(need_weights: bool, padded: bool) -> None:
    theirs = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
    ours = MultiheadAttention(WIDTH, 2, batch_first=True, attention="softmax")
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 5, WIDTH)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    padding = torch.zeros(2, 5).masked_fill(torch.arange(5) > 3, -torch.inf) if padded else None
    results = [
        layer(x, x, x, padding, need_weights=need_weights, attn_mask=mask, is_causal=True)
        for layer in (theirs, ours)
    ]
    torch.testing.assert_close(results[1], results[0])
    with pytest.raises(UserError, match="attn_mask must be given with is_causal=True, got None"):
        ours(x, x, x, is_causal=True)


def test_signature_is_that_of_torch() -> None:
    for name in ("__init__", "forward"):
        theirs, ours = (
            list(inspect.signature(getattr(each, name)).parameters.values())
            for each in (nn.MultiheadAttention, MultiheadAttention)
        )
        assert [p.name for p in ours[: len(theirs)]] == [p.name for p in theirs]
        assert [p.default for p in ours[: len(theirs)]] == [p.default for p in theirs]
    added = [p for p in inspect.signature(MultiheadAttention).parameters.values() if p.kind == 3]
    assert [p.name for p in added] == ["attention", "attention_options"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("as_float", [False, True])
def test_padding_changes_nothing(kind: str, side: str, as_float: bool) -> None:
    layer = MultiheadAttention(WIDTH, 2, batch_first=True, attention=kind).double()
    x = torch.randn(1, 4, WIDTH, dtype=torch.float64)
    alone, alone_weights = layer(x, x, x)
    junk = 100 * torch.randn(1, 3, WIDTH, dtype=torch.float64)
    padded = torch.cat([junk, x] if side == "left" else [x, junk], dim=1)
    mask = torch.zeros(1, 7, dtype=torch.bool)
    rows = slice(3, None) if side == "left" else slice(None, 4)
    mask[:] = True
    mask[:, rows] = False
    if as_float:
        mask = torch.zeros(1, 7).double().masked_fill(mask, -torch.inf)
    output, weights = layer(padded, padded, padded, key_padding_mask=mask)
    torch.testing.assert_close(output[:, rows], alone)
    torch.testing.assert_close(weights[:, rows, rows], alone_weights)
    assert not weights[0][:, mask[0] != 0].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hint", [False, True])
def test_the_future_changes_nothing(kind: str, hint: bool) -> None:
    layer = MultiheadAttention(WIDTH, 2, batch_first=True, attention=kind).double()
    x = torch.randn(2, 6, WIDTH, dtype=torch.float64)
    other = torch.cat([x[:, :4], torch.randn(2, 2, WIDTH, dtype=torch.float64)], dim=1)
    mask = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
    first, second = (
        layer(each, each, each, attn_mask=mask, is_causal=hint, need_weights=False)[0]
        for each in (x, other)
    )
    torch.testing.assert_close(first[:, :4], second[:, :4])
    assert not torch.allclose(first[:, 4:], second[:, 4:])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_see_nothing_give_zeros(kind: str) -> None:
    layer = MultiheadAttention(WIDTH, 2, batch_first=True, attention=kind)
    x = torch.randn(2, 4, WIDTH, requires_grad=True)
    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[2] = True
    padding = torch.tensor([[False] * 4, [True] * 4])
    output, weights = layer(x, x, x, attn_mask=mask, key_padding_mask=padding)
    blind = layer.out_proj.bias.detach()
    assert_same(output[0, 2].detach(), blind)
    assert_same(output[1].detach(), blind.expand(4, WIDTH))
    assert not weights[0, 2].any() and not weights[1].any()
    output.sum().backward()
    assert x.grad.isfinite().all()


def test_maps_of_heads_and_their_average() -> None:
    layer = MultiheadAttention(WIDTH, 3)
    x, memory = torch.randn(4, 2, WIDTH), torch.randn(5, 2, WIDTH)
    output, heads = layer(x, memory, memory, average_attn_weights=False)
    fast, none = layer(x, memory, memory, need_weights=False)
    assert heads.shape == (2, 3, 4, 5) and none is None
    assert (heads >= 0).all() and heads.sum(-1).mean().item() == pytest.approx(1, abs=1e-3)
    torch.testing.assert_close(layer(x, memory, memory)[1], heads.mean(dim=1))
    torch.testing.assert_close(output, fast)
    assert layer(x[:, 0], memory[:, 0], memory[:, 0])[1].shape == (4, 5)


def test_float_masks_are_added_to_the_scores_of_relu() -> None:
    layer = MultiheadAttention(4, 1, bias=False, attention_options={"threshold": 0.0, "power": 1})
    eye = torch.eye(4)
    layer.in_proj_weight.data.copy_(torch.cat([0 * eye, 0 * eye, eye]))
    layer.out_proj.weight.data.copy_(eye)
    x = torch.randn(3, 4)
    bias = torch.tensor([[1.0, 3.0, -torch.inf], [0.0, -1.0, 2.0], [5.0, 5.0, 0.0]])
    output, weights = layer(x, x, x, attn_mask=bias)
    expected = torch.tensor([[0.25, 0.75, 0.0], [0.0, 0.0, 1.0], [0.5, 0.5, 0.0]])
    torch.testing.assert_close(weights, expected, atol=1e-3, rtol=0)
    torch.testing.assert_close(output, expected @ x, atol=1e-2, rtol=0)


def test_learned_biases_get_a_gradient() -> None:
    layer = MultiheadAttention(WIDTH, 2)
    x = torch.randn(3, WIDTH)
    bias = torch.zeros(3, 3, requires_grad=True)
    layer(x, x, x, attn_mask=bias)[0].sum().backward()
    assert bias.grad.abs().sum() > 0


def test_dropout_is_off_in_evaluation() -> None:
    layer = MultiheadAttention(WIDTH, 2, dropout=0.5)
    x = torch.randn(5, WIDTH)
    first, second = (layer(x, x, x)[0] for _ in range(2))
    assert not torch.allclose(first, second)
    layer.eval()
    assert_same(layer(x, x, x), layer(x, x, x))


@pytest.mark.parametrize("kind", ["normalised_relu", "softmax"])
def test_autocast_computes_in_half_precision(kind: str) -> None:
    layer = MultiheadAttention(WIDTH, 2, add_bias_kv=True, attention=kind)
    x = torch.randn(4, 2, WIDTH)
    bias = torch.randn(4, 4)
    expected, weights = layer(x, x, x, attn_mask=bias)
    with torch.autocast("cpu", torch.bfloat16):
        output, half = layer(x, x, x, attn_mask=bias)
        output.float().square().sum().backward()
    assert output.dtype == half.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), expected, rtol=0.05, atol=0.05)
    torch.testing.assert_close(half.float(), weights, rtol=0.05, atol=0.02)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_padding_of_self_attention_is_left_out_of_the_loss() -> None:
    layer = MultiheadAttention(WIDTH, 2, batch_first=True, attention_options={"row_loss": 1.0})
    x = torch.randn(1, 4, WIDTH)
    padded = torch.cat([x, 50 * torch.randn(1, 3, WIDTH)], dim=1)
    mask = torch.arange(7)[None] > 3
    found = []
    for each, padding in ((x, None), (padded, mask)):
        layer.zero_grad()
        (0 * layer(each, each, each, key_padding_mask=padding)[0]).sum().backward()
        found.append(layer.core.threshold_offset.grad)
    torch.testing.assert_close(*found)
    assert found[0].abs().sum() > 0


def test_weights_of_torch_load_and_others_are_refused() -> None:
    theirs, ours = nn.MultiheadAttention(WIDTH, 2), MultiheadAttention(WIDTH, 2)
    ours.load_state_dict(theirs.state_dict())
    assert_same(ours.in_proj_weight, theirs.in_proj_weight)
    with pytest.raises(RuntimeError, match="core.threshold_offset"):
        theirs.load_state_dict(ours.state_dict())


def test_a_module_of_torch_is_converted_in_place() -> None:
    module = nn.MultiheadAttention(WIDTH, 2, kdim=5, vdim=7, dtype=torch.float64).eval()
    parameters = dict(module.named_parameters())
    calls: list[Any] = []
    module.register_forward_hook(lambda *arguments: calls.append(arguments))
    query = torch.randn(3, WIDTH).double()
    memory = torch.randn(4, 5).double(), torch.randn(4, 7).double()
    expected = module(query, *memory)
    converted = MultiheadAttention.from_torch(module, "softmax")
    assert converted is module and not converted.core.training
    torch.testing.assert_close(module(query, *memory), expected)
    assert len(calls) == 2
    MultiheadAttention.from_torch(module, "normalised_relu", {"power": 8})
    assert all(dict(module.named_parameters())[name] is p for name, p in parameters.items())
    assert module.core.threshold_offset.dtype == torch.float64
    with pytest.raises(UserError, match="unknown attention 'reul'"):
        MultiheadAttention.from_torch(module, "reul")

    class Other(nn.MultiheadAttention):
        pass

    with pytest.raises(UserError, match="must be a torch.nn.MultiheadAttention, got Other"):
        MultiheadAttention.from_torch(Other(WIDTH, 2))


def test_gates_are_a_projection_of_the_query() -> None:
    layer = MultiheadAttention(WIDTH, 2, attention="gated")
    softmax = MultiheadAttention(WIDTH, 2, attention="softmax")
    softmax.load_state_dict({k: v for k, v in layer.state_dict().items() if "gate" not in k})
    layer.gate_proj.weight.data.zero_()
    layer.gate_proj.bias.data.fill_(100.0)
    x = torch.randn(3, 2, WIDTH)
    torch.testing.assert_close(layer(x, x, x)[0], softmax(x, x, x)[0])
    layer.gate_proj.bias.data.fill_(-100.0)
    assert_same(layer(x, x, x)[0], layer.out_proj.bias.expand(3, 2, WIDTH))
    layer.set_attention("relu")
    assert not any("gate" in name for name, _ in layer.named_parameters())


def test_copies_pickles_and_saves() -> None:
    layer = MultiheadAttention(WIDTH, 2, attention_options={"power": 8}).eval()
    layer.core.threshold_offset.data.normal_()
    x = torch.randn(3, WIDTH)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    fresh = MultiheadAttention(WIDTH, 2, attention_options={"power": 8}).eval()
    fresh.load_state_dict(layer.state_dict())
    saved = torch.load(buffer, weights_only=False)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), saved, fresh):
        assert_same(other(x, x, x), layer(x, x, x))


@pytest.mark.parametrize("kind", ["normalised_relu", "softmax"])
def test_compiles_without_graph_breaks(kind: str) -> None:
    layer = MultiheadAttention(WIDTH, 2, batch_first=True, attention=kind)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 5, WIDTH)
    padding = torch.arange(5)[None] > torch.tensor([[4], [2]])
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    for arguments in ({"key_padding_mask": padding}, {"attn_mask": mask, "is_causal": True}):
        expected, found = (each(x, x, x, **arguments)[0] for each in (layer, compiled))
        torch.testing.assert_close(found, expected)
        grads = []
        for output in (expected, found):
            layer.zero_grad()
            output.square().sum().backward()
            grads.append([p.grad.clone() for p in layer.parameters()])
        torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-5)


def bad(**changes: Any) -> dict[str, Any]:
    x = torch.randn(2, 4, WIDTH)
    return {"query": x, "key": x, "value": x, **changes}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (bad(query=torch.randn(WIDTH)), "query must have 3 dimensions, or 2 if .* got shape"),
        (bad(key=torch.randn(4, WIDTH)), "key must have 3 dimensions"),
        (bad(query=torch.randn(2, 4, 5)), "query must have width 12, got 5"),
        (bad(value=torch.randn(2, 3, WIDTH)), "value must have as many rows as key, got"),
        (bad(query=torch.randn(3, 4, WIDTH)), "key must have the batch size 3 of query, got 2"),
        (bad(attn_mask=torch.zeros(3, 4)), r"attn_mask must have shape \(4, 4\) or \(4, 4, 4\)"),
        (bad(attn_mask=torch.zeros(4, 4).int()), "attn_mask must be bool .* got torch.int32"),
        (bad(key_padding_mask=torch.zeros(2, 3)), r"key_padding_mask must have shape \(2, 4\)"),
        (bad(key_padding_mask=torch.zeros(2, 4).byte()), "key_padding_mask must be bool .*uint8"),
        (bad(query=torch.nested.nested_tensor([torch.randn(3, WIDTH)])), "got a nested one"),
    ],
)
def test_mistakes_are_one_sentence(call: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        MultiheadAttention(WIDTH, 2, batch_first=True)(**call)


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UserError, match="embed_dim must be a multiple of num_heads, got 12 and 5"):
        MultiheadAttention(12, 5)


def test_a_head_width_that_a_named_backend_does_not_have_is_refused() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = MultiheadAttention(24, 1, attention_options={"impl": "triton"}).to(device)
    x = torch.zeros(3, 1, 24, device=device)
    with pytest.raises(UserError, match="impl='triton' cannot run .* head widths must be one of"):
        layer(x, x, x, need_weights=False)
