"""Models that tell less about their attention than the eight families do."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from reluformer.errors import UserError  # noqa: E402  # after the check for the package
from reluformer.hf.layers import LayerAttention, layer_attentions  # noqa: E402
from tests.hf.families import VOCABULARY, build, padding, tokens  # noqa: E402

SIZES = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "num_attention_heads": 4}
ENCODER = {**SIZES, "hidden_size": 32, "intermediate_size": 48}
DECODER = {**ENCODER, "num_key_value_heads": 4, "head_dim": 8}


def make(kind: str, attention: str, **fields: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**fields)
    model = getattr(transformers, f"{kind}Model")
    return model._from_config(config, attn_implementation=attention).eval()


def changes(model: Any, inputs: dict[str, Tensor], name: str) -> Tensor:
    """How much each output row changes, [T], if the last of the ids `name` does."""
    other = inputs[name].clone()
    other[0, -1] = (other[0, -1] + 1) % VOCABULARY
    first, second = (model(**{**inputs, name: ids})[0] for ids in (inputs[name], other))
    return (first - second).abs().amax(dim=-1)[0]


@pytest.mark.parametrize("mask", [None, torch.ones(1, 9, dtype=torch.long)])
@pytest.mark.parametrize("kind", ["Splinter", "AlignText"])
def test_encoders_without_sdpa_see_all_tokens(kind: str, mask: Tensor | None) -> None:
    inputs = {"input_ids": tokens(1, 9)} | ({} if mask is None else {"attention_mask": mask})
    assert bool((changes(make(kind, "relu", **ENCODER), inputs, "input_ids") > 0).all())


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("Doge", DECODER),
        ("UMT5", {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}),
        (
            "NllbMoe",
            {
                **{"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "num_experts": 2},
                **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
                **{f"{part}_ffn_dim": 48 for part in ("encoder", "decoder")},
                **{f"{part}_sparse_step": 0 for part in ("encoder", "decoder")},
            },
        ),
    ],
)
def test_decoders_that_do_not_say_so_are_causal(kind: str, fields: dict[str, Any]) -> None:
    model = make(kind, "relu", **{**fields, "vocab_size": VOCABULARY})
    name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    inputs = {"input_ids": tokens(1, 9), name: tokens(1, 9)}
    moved = changes(model, inputs, name)
    assert not bool(moved[:-1].any()) and float(moved[-1]) > 0


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_row_losses_of_encoders_leave_padding_out(family: str) -> None:
    gradients = []
    for pad in (5, 9):
        model = build(family, "normalised_relu").train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        encoder = model.get_encoder() if family == "t5" else model
        mask = padding(left=False)
        ids = tokens(2, 7).masked_fill(mask == 0, pad)
        output = encoder(input_ids=ids, attention_mask=mask)[0]
        (output * mask.unsqueeze(-1)).sum().backward()
        gradients.append([layer.threshold_offset.grad for layer in layer_attentions(encoder)])
    torch.testing.assert_close(*gradients)


def test_models_with_parameters_of_their_own_load(tmp_path: Path) -> None:
    make("DiffLlama", "relu", **DECODER).save_pretrained(tmp_path)
    model = transformers.AutoModel.from_pretrained(tmp_path)
    assert len(layer_attentions(model)) == 2
    plain = make("DiffLlama", "eager", **DECODER)
    plain.save_pretrained(tmp_path / "plain")
    transformers.AutoModel.from_pretrained(tmp_path / "plain", attn_implementation="relu")


def test_a_gate_is_not_left_out_of_a_second_call() -> None:
    with pytest.raises(UserError, match="gated attention needs a module that attends once"):
        make("DiffLlama", "gated", **DECODER)(tokens(1, 5))


def test_a_refused_attention_leaves_the_model_as_it_was() -> None:
    model = build("llama", "normalised_relu")
    model.config.attention_options = {"power": 4}
    model.set_attn_implementation("relu")
    ids = tokens(1, 6)
    expected = model(ids).logits
    with pytest.raises(UserError, match="entmax15 attention has no option 'power'"):
        model.set_attn_implementation("entmax15")
    assert model.config._attn_implementation == "relu"
    assert torch.equal(model(ids).logits, expected)


class Wrapper(nn.Module):
    """The wrapper that PEFT puts around `modules_to_save`: a copy runs in place of the module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.active = copy.deepcopy(module)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("active"), name)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return self.active(*arguments, **named)


def test_a_wrapped_attention_runs() -> None:
    model = build("llama", "normalised_relu")
    ids = tokens(1, 6)
    expected = model(ids).logits
    for layer in model.model.layers:
        layer.self_attn.reluformer = Wrapper(layer.self_attn.reluformer)
        assert isinstance(layer.self_attn.reluformer.active, LayerAttention)
    torch.testing.assert_close(model(ids).logits, expected)
