"""The transformer layers against torch's own with softmax, and their promises with ReLU."""

import copy
import inspect
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import reluformer.nn as ours
from reluformer.errors import UserError
from tests.ops.inputs import assert_same

SIZES = {"d_model": 12, "nhead": 2, "dim_feedforward": 16, "dropout": 0.0}
LAYERS = ("TransformerEncoderLayer", "TransformerDecoderLayer", "Transformer")


def options(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "batch_first": draw(st.booleans()),
        "norm_first": draw(st.booleans()),
        "bias": draw(st.booleans()),
        "activation": draw(st.sampled_from(["relu", "gelu"])),
        "dtype": torch.float64,
    }


def twins(name: str, seed: int, **arguments: Any) -> tuple[nn.Module, Any]:
    """A module of torch and ours with softmax, both initialised from one seed."""
    with warnings.catch_warnings():
        # torch says why it will not use nested tensors.
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        theirs = getattr(nn, name)(**SIZES, **arguments)
    torch.manual_seed(seed)
    module = getattr(ours, name)(**SIZES, **arguments, attention="softmax")
    assert_same(module.state_dict(), theirs.state_dict())
    return theirs, module


def agree(theirs: nn.Module, module: nn.Module, mode: str, call: Callable[..., Tensor]) -> None:
    """Compare outputs and, unless in inference mode, the gradients of all parameters."""
    results = []
    for each in (theirs, module):
        each.train(mode == "train")
        with torch.inference_mode(mode == "inference"):
            output = call(each)
        result = [output.clone()]
        if mode != "inference":
            result += torch.autograd.grad(output.square().sum(), list(each.parameters()))
        results.append(result)
    torch.testing.assert_close(results[1], results[0], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("mode", ["train", "eval", "inference"])
@given(data=st.data())
def test_encoders_agree_with_torch(mode: str, data: st.DataObject) -> None:
    arguments = options(data.draw)
    layers, seed = data.draw(st.integers(1, 2)), data.draw(st.integers(0, 99))
    layer = twins("TransformerEncoderLayer", seed, **arguments)
    norm = nn.LayerNorm(12, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = nn.TransformerEncoder(layer[0], layers, norm)
    module = ours.TransformerEncoder(layer[1], layers, norm)
    x = torch.randn(3, 5, 12, dtype=torch.float64)
    padding = torch.arange(5) >= torch.tensor([[5], [3], [1]])
    if not arguments["batch_first"]:
        x = x.transpose(0, 1)
    mask = data.draw(st.sampled_from(["none", "causal", "bool"]))
    masks = {
        "none": None,
        "causal": nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64),
        "bool": torch.ones(5, 5, dtype=torch.bool).triu(2),
    }
    pad = padding if data.draw(st.booleans()) else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")

        def call(encoder: nn.Module) -> Tensor:
            output: Tensor = encoder(x, mask=masks[mask], src_key_padding_mask=pad)
            # torch's fast path gives zeros for padding, other paths do not.
            rows = torch.zeros_like(padding) if pad is None else padding
            rows = rows if arguments["batch_first"] else rows.T
            return output.masked_fill(rows[..., None], 0.0)

        agree(theirs, module, mode, call)


@pytest.mark.parametrize("mode", ["train", "eval", "inference"])
@given(data=st.data())
def test_transformers_agree_with_torch(mode: str, data: st.DataObject) -> None:
    arguments = options(data.draw) | {"num_encoder_layers": 1, "num_decoder_layers": 2}
    theirs, module = twins("Transformer", data.draw(st.integers(0, 99)), **arguments)
    source, target = (torch.randn(2, n, 12, dtype=torch.float64) for n in (5, 4))
    if not arguments["batch_first"]:
        source, target = source.transpose(0, 1), target.transpose(0, 1)
    padding = torch.arange(5) >= torch.tensor([[5], [3]])
    causal = nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        agree(
            theirs,
            module,
            mode,
            lambda model: model(
                source,
                target,
                tgt_mask=causal,
                src_key_padding_mask=padding,
                memory_key_padding_mask=padding,
            ),
        )


@pytest.mark.parametrize("mode", ["train", "eval", "inference"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_decoder_layers_agree_with_torch(mode: str, norm_first: bool) -> None:
    layers = twins("TransformerDecoderLayer", 3, norm_first=norm_first, dtype=torch.float64)
    theirs = nn.TransformerDecoder(layers[0], 2)
    module = ours.TransformerDecoder(layers[1], 2)
    x, memory = (torch.randn(n, 2, 12, dtype=torch.float64) for n in (4, 3))
    mask = torch.ones(4, 4, dtype=torch.bool).triu(1)
    agree(theirs, module, mode, lambda each: each(x, memory, tgt_mask=mask))


@pytest.mark.parametrize("name", LAYERS)
def test_signatures_are_those_of_torch(name: str) -> None:
    theirs, mine = (inspect.signature(getattr(m, name)).parameters for m in (nn, ours))
    assert list(mine) == [*theirs, "attention", "attention_options"]
    assert [p.default for p in mine.values()][:-2] == [p.default for p in theirs.values()]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("build", ["layer", "encoder", "transformer", "torch encoder"])
@pytest.mark.parametrize("grad", ["inference_mode", "no_grad", "enable_grad"])
def test_the_fast_path_never_replaces_relu(build: str, grad: str) -> None:
    arguments: dict[str, Any] = {**SIZES, "batch_first": True}
    layer = ours.TransformerEncoderLayer(**arguments)
    x = torch.randn(2, 6, 12)
    padding = torch.arange(6) >= torch.tensor([[6], [3]])
    if build == "layer":
        model: nn.Module = layer
    elif build == "encoder":
        model = ours.TransformerEncoder(layer, 1)
    elif build == "torch encoder":
        model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    else:
        model = ours.Transformer(**arguments, num_encoder_layers=1, num_decoder_layers=1).encoder
    # Dropout is 0, and so training mode computes the same on the ordinary path.
    expected = model.train()(x, src_key_padding_mask=padding)
    with getattr(torch, grad)():
        output = model.eval()(x, src_key_padding_mask=padding)
    torch.testing.assert_close(output[~padding], expected[~padding])
    calls: list[Any] = []
    attentions = [m for m in model.modules() if isinstance(m, ours.MultiheadAttention)]
    attentions[0].core.register_forward_hook(lambda *arguments: calls.append(arguments))
    with getattr(torch, grad)():
        model(x)
    assert calls


def test_layers_of_torch_get_the_recommended_attention() -> None:
    encoder = ours.TransformerEncoder(nn.TransformerEncoderLayer(**SIZES), 2)
    decoder = ours.TransformerDecoder(nn.TransformerDecoderLayer(**SIZES), 2)
    kept = ours.TransformerEncoder(ours.TransformerEncoderLayer(**SIZES, attention="entmax15"), 2)
    named = ours.TransformerEncoder(
        ours.TransformerEncoderLayer(**SIZES), 2, attention="relu", attention_options={"power": 2}
    )

    def kinds(model: nn.Module) -> list[str]:
        return [m.row.name for m in model.modules() if isinstance(m, ours.AttentionCore)]

    assert kinds(encoder) == ["normalised_relu"] * 2
    assert kinds(decoder) == ["normalised_relu"] * 4
    assert kinds(kept) == ["entmax15"] * 2 and kinds(named) == ["relu"] * 2
    cores = [m for m in encoder.modules() if isinstance(m, ours.AttentionCore)]
    assert cores[0].threshold_offset is not cores[1].threshold_offset


@pytest.mark.parametrize("kind", ["normalised_relu", "relu", "sigmoid"])
def test_padding_and_future_change_nothing(kind: str) -> None:
    model = ours.Transformer(
        **SIZES,
        num_encoder_layers=1,
        num_decoder_layers=1,
        batch_first=True,
        attention=kind,
        dtype=torch.float64,
    )
    source, target = torch.randn(1, 5, 12).double(), torch.randn(1, 4, 12).double()
    causal = nn.Transformer.generate_square_subsequent_mask(4)
    alone = model(source, target, tgt_mask=causal)
    junk = 100 * torch.randn(1, 2, 12).double()
    padding = torch.tensor([[True, True, False, False, False, False, False]])
    padded = model(
        torch.cat([junk, source], dim=1),
        target,
        tgt_mask=causal,
        src_key_padding_mask=padding,
        memory_key_padding_mask=padding,
    )
    torch.testing.assert_close(padded, alone)
    later = torch.cat([target[:, :3], junk[:, :1]], dim=1)
    torch.testing.assert_close(model(source, later, tgt_mask=causal)[:, :3], alone[:, :3])


def test_copies_and_pickles() -> None:
    model = ours.Transformer(**SIZES, num_encoder_layers=1, num_decoder_layers=1).eval()
    x = torch.randn(3, 2, 12)
    fresh = ours.Transformer(**SIZES, num_encoder_layers=1, num_decoder_layers=1).eval()
    fresh.load_state_dict(model.state_dict())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), fresh):
        assert_same(other(x, x), model(x, x))
    softmax = nn.Transformer(**SIZES, num_encoder_layers=1, num_decoder_layers=1)
    fresh.load_state_dict(softmax.state_dict())


def test_compiles_without_graph_breaks() -> None:
    encoder = ours.TransformerEncoder(ours.TransformerEncoderLayer(**SIZES, batch_first=True), 1)
    compiled = torch.compile(encoder, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 5, 12)
    padding = torch.arange(5) >= torch.tensor([[5], [3]])
    expected, output = (e(x, src_key_padding_mask=padding) for e in (encoder, compiled))
    torch.testing.assert_close(output, expected)
    output.sum().backward()


def test_mistakes_are_one_sentence() -> None:
    with pytest.raises(UserError, match="unknown attention 'reul'; known: "):
        ours.TransformerEncoderLayer(**SIZES, attention="reul")
    with pytest.raises(UserError, match="relu attention has no option 'powr'; its options: "):
        ours.Transformer(**SIZES, attention="relu", attention_options={"powr": 2})
    nested = torch.nested.nested_tensor([torch.randn(3, 12), torch.randn(2, 12)])
    with pytest.raises(UserError, match="query must be a dense tensor, got a nested one"):
        ours.TransformerEncoderLayer(**SIZES, batch_first=True).eval()(nested)
