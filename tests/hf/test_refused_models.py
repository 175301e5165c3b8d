"""Models that do not use transformers' attention interface are refused, never run with softmax."""

from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from reluformer.errors import UserError  # noqa: E402  # after the check for the package
from reluformer.hf import replace_attention_modules  # noqa: E402
from tests.hf.families import FAMILIES, TOKENS, VOCABULARY  # noqa: E402

REFUSED = {
    "bloom": {"hidden_size": 32, "n_layer": 1, "n_head": 2},
    "codegen": {"n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4},
    "xglm": {"d_model": 32, "num_layers": 1, "attention_heads": 2, "ffn_dim": 32},
    "mpt": {"d_model": 32, "n_layers": 1, "n_heads": 2},
    "falcon": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    "gptj": {"n_embd": 32, "n_layer": 1, "n_head": 2, "rotary_dim": 8},
}
"""Falcon and GPT-J look up the class of their attention; the others ignore the setting."""


def config_of(kind: str) -> Any:
    fields = {**TOKENS, **REFUSED[kind], "vocab_size": VOCABULARY}
    return transformers.AutoConfig.for_model(kind, **fields)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_without_the_interface_is_refused(kind: str) -> None:
    auto = transformers.AutoModelForCausalLM
    message = f"(?i)'relu' is not possible for {kind}.*: it does not use transformers' attention"
    with pytest.raises(UserError, match=message):
        auto.from_config(config_of(kind), attn_implementation="relu")
    model = auto.from_config(config_of(kind), attn_implementation="eager")
    for change in (model.set_attn_implementation, lambda k: replace_attention_modules(model, k)):
        with pytest.raises(UserError, match=message):
            change("relu")
        assert model.config._attn_implementation == "eager"
        assert model.config.attention_options is None


def test_loading_a_model_without_the_interface_is_refused(tmp_path: Any) -> None:
    transformers.AutoModelForCausalLM.from_config(config_of("falcon")).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="FalconForCausalLM"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="relu")


@pytest.mark.parametrize("request_", ["relu", {"decoder": "relu"}])
def test_a_part_without_the_interface_is_refused(request_: Any) -> None:
    decoder = transformers.TrOCRConfig(
        vocab_size=VOCABULARY, d_model=32, decoder_layers=1, decoder_attention_heads=4
    )
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        FAMILIES["vit"].config(), decoder
    )
    model = transformers.VisionEncoderDecoderModel(config)
    with pytest.raises(UserError, match="TrOCR"):
        model.set_attn_implementation(request_)
    assert model.encoder.config._attn_implementation == "sdpa"
    model.set_attn_implementation({"encoder": "relu"})
    assert model.encoder.config._attn_implementation == "relu"


def test_an_attention_of_torch_that_stays_softmax_gives_a_warning() -> None:
    sizes = {"num_attention_heads": 2, "image_size": 12, "patch_size": 4, "hidden_size": 16}
    config = transformers.SiglipVisionConfig(num_hidden_layers=1, intermediate_size=16, **sizes)
    with pytest.warns(UserWarning, match="'relu' leaves the attention of torch in Siglip"):
        transformers.SiglipVisionModel._from_config(config, attn_implementation="relu")
