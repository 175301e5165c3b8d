"""Models of several parts, of which some have one of our attentions: saving and loading."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from reluformer.errors import UserError  # noqa: E402  # after the check for the package
from reluformer.hf.layers import layer_attentions  # noqa: E402
from reluformer.nn import replace_attention  # noqa: E402
from tests.hf.families import FAMILIES, VOCABULARY, build, tokens  # noqa: E402

SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}


def captioner() -> Any:
    """A vision encoder and a text decoder."""
    torch.manual_seed(0)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        FAMILIES["vit"].config(), FAMILIES["gpt2"].config()
    )
    return transformers.VisionEncoderDecoderModel(config).eval()


def clip(attention: dict[str, str]) -> Any:
    text = {**SMALL, "num_attention_heads": 2, "vocab_size": VOCABULARY, "eos_token_id": 2}
    image = {**SMALL, "num_attention_heads": 2, "image_size": 12, "patch_size": 4}
    config = transformers.CLIPConfig(text_config=text, vision_config=image)
    return transformers.CLIPModel._from_config(config, attn_implementation=attention).eval()


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_a_part_loads_with_its_attention(part: str, tmp_path: Path) -> None:
    model = captioner()
    replace_attention(getattr(model, part), "relu")
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "reluformer_vision-encoder-decoder"
    assert saved["attn_implementation"] == {part: "relu"}
    x = torch.randn(1, 3, 12, 12)
    arguments = {"pixel_values": x, "decoder_input_ids": tokens(1, 5)}
    expected = model(**arguments).logits
    for kind in (transformers.AutoModelForImageTextToText, type(model)):
        loaded = kind.from_pretrained(tmp_path).eval()
        names = {p: getattr(loaded, p).config._attn_implementation for p in ("encoder", "decoder")}
        assert names == {"encoder": "sdpa", "decoder": "sdpa", part: "relu"}
        torch.testing.assert_close(loaded(**arguments).logits, expected)


@pytest.mark.parametrize("part", ["text_config", "vision_config"])
def test_each_tower_of_clip_keeps_its_attention(part: str, tmp_path: Path) -> None:
    other = {"text_config": "vision_config", "vision_config": "text_config"}[part]
    model = clip({part: "normalised_relu", other: "sdpa"})
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModel.from_pretrained(tmp_path)
    assert getattr(loaded.config, part)._attn_implementation == "normalised_relu"
    assert getattr(loaded.config, other)._attn_implementation == "sdpa"
    assert len(layer_attentions(loaded)) == len(layer_attentions(model)) == 1


def test_two_attentions_of_ours_are_kept_apart(tmp_path: Path) -> None:
    clip({"": "relu", "text_config": "relu", "vision_config": "silu"}).save_pretrained(tmp_path)
    config = transformers.CLIPModel.from_pretrained(tmp_path).config
    parts = (config, config.text_config, config.vision_config)
    assert [part._attn_implementation for part in parts] == ["relu", "relu", "silu"]


@pytest.mark.slow
def test_without_this_package_a_part_with_relu_is_refused(tmp_path: Path) -> None:
    clip({"text_config": "relu", "vision_config": "sdpa"}).save_pretrained(tmp_path)
    script = f"from transformers import CLIPModel as M; M.from_pretrained({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode != 0 and "relu" in done.stderr


@pytest.mark.parametrize(("whole", "part"), [("sdpa", "relu"), ("relu", "sdpa")])
def test_a_part_that_the_configuration_does_not_hold_is_not_saved(
    whole: str, part: str, tmp_path: Path
) -> None:
    model = build("t5", whole)
    model.encoder.set_attn_implementation(part)
    message = f"cannot be saved, because its configuration does not hold the attention '{part}'"
    with pytest.raises(UserError, match=message):
        model.save_pretrained(tmp_path / "mixed")
    model.set_attn_implementation(whole)
    model.save_pretrained(tmp_path / "whole")
