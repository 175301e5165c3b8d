"""Our own models as transformers models."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from reluformer import ModelConfig, ReLUFormer, ReLUFormerLM  # noqa: E402  # after the check
from reluformer.data.tokenizer import Tokenizer  # noqa: E402
from reluformer.errors import UserError  # noqa: E402
from reluformer.hf import (  # noqa: E402
    ReLUFormerConfig,
    ReLUFormerForCausalLM,
    ReLUFormerForConditionalGeneration,
    to_transformers,
)
from reluformer.model.config import AttentionConfig  # noqa: E402
from reluformer.model.losses import attention_losses  # noqa: E402
from tests.hf.families import padding, tokens  # noqa: E402

CONFIG = ModelConfig(
    vocabulary=40, width=32, heads=4, encoder_layers=2, decoder_layers=2, slots=48, dropout=0.0
)
GREEDY = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}


@pytest.fixture(params=["sinusoidal", "rotary"])
def config(request: pytest.FixtureRequest) -> ModelConfig:
    torch.manual_seed(0)
    return dataclasses.replace(CONFIG, positions=request.param, kv_heads=2)


def test_translation_model_agrees_with_ours(config: ModelConfig) -> None:
    ours = ReLUFormer(config).eval()
    wrapped = ReLUFormerForConditionalGeneration.from_model(ours).eval()
    source, target, mask = tokens(2, 7), tokens(2, 6, seed=1), padding(left=False)
    expected = ours(source, target, mask.sum(dim=-1)).logits
    found = wrapped(input_ids=source, attention_mask=mask, decoder_input_ids=target)
    torch.testing.assert_close(found.logits, expected)
    maps = wrapped(
        input_ids=source, attention_mask=mask, decoder_input_ids=target, output_attentions=True
    )
    assert len(maps.cross_attentions) == len(maps.encoder_attentions) == 2
    assert maps.decoder_attentions[0].shape == (2, 4, 6, 6)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_padding_masks_of_other_dtypes(config: ModelConfig, dtype: torch.dtype) -> None:
    wrapped = ReLUFormerForConditionalGeneration.from_model(ReLUFormer(config)).eval()
    given = {"input_ids": tokens(2, 7), "decoder_input_ids": tokens(2, 6, seed=1)}
    mask = padding(left=False)
    expected = wrapped(**given, attention_mask=mask).logits
    torch.testing.assert_close(wrapped(**given, attention_mask=mask.to(dtype)).logits, expected)


@pytest.mark.parametrize("beams", [1, 3])
def test_caches_generate_the_tokens_of_no_cache(config: ModelConfig, beams: int) -> None:
    wrapped = ReLUFormerForConditionalGeneration.from_model(ReLUFormer(config)).eval()
    arguments = {"input_ids": tokens(2, 7), "attention_mask": padding(left=False)}
    expected = wrapped.generate(**arguments, **GREEDY, num_beams=beams, use_cache=False)
    assert torch.equal(wrapped.generate(**arguments, **GREEDY, num_beams=beams), expected)
    static = wrapped.generate(**arguments, **GREEDY, num_beams=beams, cache_implementation="static")
    assert torch.equal(static, expected)


def test_language_model_with_padding_on_either_side(config: ModelConfig) -> None:
    ours = ReLUFormerLM(config).eval()
    wrapped = ReLUFormerForCausalLM.from_model(ours).eval()
    ids = tokens(2, 7)
    torch.testing.assert_close(wrapped(input_ids=ids).logits, ours(ids).logits)
    for left in (False, True):
        mask = padding(left)
        found = wrapped(input_ids=ids, attention_mask=mask).logits[1][mask[1].bool()]
        expected = ours(ids[1:, mask[1].bool()]).logits[0]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    arguments = {"input_ids": ids, "attention_mask": padding(left=True)}
    expected = wrapped.generate(**arguments, **GREEDY, use_cache=False)
    for cache in (None, "static"):
        found = wrapped.generate(**arguments, **GREEDY, cache_implementation=cache)
        assert torch.equal(found, expected)
    alone = wrapped.generate(input_ids=ids[1:, 2:], **GREEDY)
    assert torch.equal(expected[1, 2:], alone[0])


@pytest.mark.parametrize("gamma", ["layer", "model"])
@pytest.mark.parametrize("tied", [True, False])
def test_saved_models_load_by_the_auto_classes(tied: bool, gamma: str, tmp_path: Path) -> None:
    attention = AttentionConfig(gamma=gamma)  # type: ignore[arg-type]
    config = dataclasses.replace(CONFIG, tie_embeddings=tied, attention=attention)
    for wrapper, ours, auto in (
        (ReLUFormerForConditionalGeneration, ReLUFormer, transformers.AutoModelForSeq2SeqLM),
        (ReLUFormerForCausalLM, ReLUFormerLM, transformers.AutoModelForCausalLM),
    ):
        folder = tmp_path / wrapper.__name__
        model = wrapper.from_model(ours(config)).eval()
        model.save_pretrained(folder)
        loaded = auto.from_pretrained(folder)
        assert type(loaded) is type(transformers.AutoModel.from_pretrained(folder)) is wrapper
        assert loaded.config.model_config() == config
        expected, found = model.state_dict(), loaded.state_dict()
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[key], found[key]) for key in expected)


def test_losses_and_gradients_of_labels() -> None:
    wrapped = ReLUFormerForConditionalGeneration.from_model(ReLUFormer(CONFIG))
    labels = tokens(2, 5, seed=1)
    labels[1, 3:] = -100
    output = wrapped(input_ids=tokens(2, 7), labels=labels)
    inputs = wrapped.prepare_decoder_input_ids_from_labels(labels)
    assert inputs[:, 0].tolist() == [1, 1] and inputs[1, -1] == 0
    kept = labels != -100
    logits: Tensor = output.logits
    expected = torch.nn.functional.cross_entropy(logits[kept], labels[kept])
    torch.testing.assert_close(output.loss, expected)
    output.loss.backward()
    assert all(p.grad is not None for p in wrapped.model.decoder.parameters())
    divided = wrapped(input_ids=tokens(2, 7), labels=labels, num_items_in_batch=16).loss
    torch.testing.assert_close(divided * 16, expected * kept.sum())


def added_gradients(wrapped: Any, **inputs: Tensor) -> list[Tensor]:
    """Gradients that the losses of the attentions add."""
    gradients = []
    for wrapped.row_loss, wrapped.entropy_loss in ((0.3, 0.2), (0.0, 0.0)):
        wrapped.zero_grad()
        wrapped(**inputs).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in wrapped.parameters()])
    return [with_losses - without for with_losses, without in zip(*gradients, strict=True)]


@pytest.mark.parametrize("kind", ["translation", "language"])
def test_the_backward_pass_adds_the_losses_of_the_attentions(kind: str) -> None:
    ids, mask = tokens(2, 7), padding(left=False)
    labels = ids.masked_fill(mask == 0, -100)
    wrapped: Any
    if kind == "translation":
        wrapped = ReLUFormerForConditionalGeneration.from_model(ReLUFormer(CONFIG))
        source = tokens(2, 6, seed=1)
        found = added_gradients(wrapped, input_ids=source, labels=labels)
        target = wrapped.prepare_decoder_input_ids_from_labels(labels)
        output = wrapped.model(source, target, None, mask.sum(-1), record="entropy")
    else:
        wrapped = ReLUFormerForCausalLM.from_model(ReLUFormerLM(CONFIG))
        found = added_gradients(wrapped, input_ids=ids, attention_mask=mask, labels=labels)
        output = wrapped.model(ids, mask.sum(-1), record="entropy")
    losses = attention_losses(output.records)
    total = 0.3 * losses.normalisation + 0.2 * losses.entropy
    expected = torch.autograd.grad(total, list(wrapped.parameters()), materialize_grads=True)
    assert any(bool(gradient.any()) for gradient in expected)
    torch.testing.assert_close(found, list(expected), atol=1e-5, rtol=1e-4)
    wrapped.eval()
    assert not any(
        bool(gradient.any())
        for gradient in added_gradients(wrapped, **{"input_ids": ids, "labels": labels})
    )


def test_losses_of_the_attentions_leave_padding_on_either_side_out() -> None:
    wrapped = ReLUFormerForCausalLM.from_model(ReLUFormerLM(CONFIG))
    right, ids = padding(left=False), tokens(2, 7)
    left, rolled = padding(left=True), ids.clone()
    rolled[1] = ids[1].roll(int((right[1] == 0).sum()))
    found = added_gradients(wrapped, input_ids=rolled, attention_mask=left, labels=rolled)
    expected = added_gradients(wrapped, input_ids=ids, attention_mask=right, labels=ids)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_another_class_than_the_saved_one_is_refused(tmp_path: Path) -> None:
    ReLUFormerForCausalLM.from_model(ReLUFormerLM(CONFIG)).save_pretrained(tmp_path / "lm")
    with pytest.raises(UserError, match="cannot load a ReLUFormerForCausalLM; use"):
        transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "lm")
    model = ReLUFormerForConditionalGeneration.from_model(ReLUFormer(CONFIG))
    model.save_pretrained(tmp_path / "translation")
    with pytest.raises(UserError, match="cannot load a ReLUFormerForConditionalGeneration; use"):
        ReLUFormerForCausalLM.from_pretrained(tmp_path / "translation")


def test_new_models_from_a_configuration() -> None:
    config = ReLUFormerConfig.from_model_config(CONFIG)
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModel):
        model = auto.from_config(config)
        assert isinstance(model, ReLUFormerForCausalLM)
    config = ReLUFormerConfig.from_model_config(CONFIG, is_encoder_decoder=True)
    translator = transformers.AutoModel.from_config(config)
    assert isinstance(translator, ReLUFormerForConditionalGeneration)
    # Our initialisation, not that of transformers.
    assert abs(float(model.model.target_embedding.weight.detach().std()) - 32**-0.5) < 0.02


def test_mistakes_are_one_sentence() -> None:
    with pytest.raises(UserError, match="settings must hold"):
        ReLUFormerConfig()
    with pytest.raises(UserError, match=r"settings\.width"):
        ReLUFormerConfig(settings={"vocabulary": 10, "width": "wide"})
    model = ReLUFormerForConditionalGeneration.from_model(ReLUFormer(CONFIG))
    with pytest.raises(UserError, match="padding on the right"):
        model(input_ids=tokens(2, 7), attention_mask=padding(left=True), labels=tokens(2, 3))
    with pytest.raises(UserError, match="input_ids or encoder_outputs"):
        model(labels=tokens(2, 3))
    with pytest.raises(UserError, match="attn_implementation must not be set"):
        transformers.AutoModelForCausalLM.from_config(
            ReLUFormerConfig.from_model_config(CONFIG), attn_implementation="relu"
        )
    with pytest.raises(UserError, match="attn_implementation must not be set"):
        model.set_attn_implementation("relu")
    language = ReLUFormerForCausalLM.from_model(ReLUFormerLM(CONFIG))
    with pytest.raises(UserError, match="takes no packed batch"):
        language(tokens(1, 4), position_ids=torch.tensor([[0, 1, 0, 1]]))


def test_the_tokenizer_has_the_same_ids(tmp_path: Path) -> None:
    lines = ["It costs three euros.", "It leaves at noon."] * 3
    ours = Tokenizer.train(lines, 280)
    to_transformers(ours, 64).save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    batch = theirs(["It costs  noon\n.", "é"], padding=True, return_tensors="pt")
    assert batch["input_ids"][0].tolist() == [*ours.encode("It costs  noon\n."), ours.eos]
    assert batch["attention_mask"][1].tolist()[-1] == 0 and set(batch) >= {"input_ids"}
    document = theirs(f"It costs.{theirs.sep_token}It leaves.")["input_ids"]
    assert document == [*ours.encode_document(["It costs.", "It leaves."]), ours.eos]
    assert theirs.decode(batch["input_ids"][0], skip_special_tokens=True) == "It costs  noon\n."
    assert theirs.model_max_length == 64


def test_logits_of_chosen_positions() -> None:
    model = ReLUFormerForCausalLM.from_model(ReLUFormerLM(CONFIG)).eval()
    logits = model(tokens(2, 7)).logits
    assert torch.equal(model(tokens(2, 7), logits_to_keep=2).logits, logits[:, -2:])
    chosen = torch.tensor([0, 4])
    assert torch.equal(model(tokens(2, 7), logits_to_keep=chosen).logits, logits[:, chosen])
