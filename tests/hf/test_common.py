"""Checks of transformers' common model tests, for our own classes.

The package of transformers does not contain its `ModelTesterMixin` and `GenerationTesterMixin`.
Tests here carry the names of their checks. Saving, tied weights, caches, losses and padding are in
`test_own_models.py`. Replaced embeddings, `inputs_embeds` and gradient checkpointing, which our
classes do not have, are refused.
"""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from reluformer import ReLUFormer, ReLUFormerLM  # noqa: E402  # after the check for the package
from reluformer.errors import UserError  # noqa: E402
from reluformer.hf import (  # noqa: E402
    ReLUFormerForCausalLM,
    ReLUFormerForConditionalGeneration,
)
from tests.hf.families import tokens  # noqa: E402
from tests.hf.test_own_models import CONFIG, GREEDY  # noqa: E402


@pytest.fixture(params=["translation", "language"])
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    if request.param == "language":
        return ReLUFormerForCausalLM.from_model(ReLUFormerLM(CONFIG)).eval()
    return ReLUFormerForConditionalGeneration.from_model(ReLUFormer(CONFIG)).eval()


def inputs(model: Any) -> dict[str, Tensor]:
    ids = {"input_ids": tokens(3, 7)}
    return {**ids, "decoder_input_ids": tokens(3, 6, seed=1)} if _has_encoder(model) else ids


def _has_encoder(model: Any) -> bool:
    return isinstance(model, ReLUFormerForConditionalGeneration)


def test_forward_signature(model: Any) -> None:
    assert next(iter(inspect.signature(model.forward).parameters)) == "input_ids"


def test_hidden_states_output(model: Any) -> None:
    output = model(**inputs(model), output_hidden_states=True)
    states = output.decoder_hidden_states if _has_encoder(model) else output.hidden_states
    assert len(states) == CONFIG.decoder_layers + 1
    assert {tuple(state.shape) for state in states} == {(3, output.logits.shape[1], 32)}
    torch.testing.assert_close(model.model.logits(states[-1]), output.logits)
    ids = inputs(model)["decoder_input_ids" if _has_encoder(model) else "input_ids"]
    embedded = model.model.embed(ids, model.model.target_embedding)
    torch.testing.assert_close(states[0], embedded)
    if _has_encoder(model):
        assert len(output.encoder_hidden_states) == CONFIG.encoder_layers + 1
        last = output.encoder_hidden_states[-1]
        torch.testing.assert_close(last, output.encoder_last_hidden_state)
    # Hooks of the call above are gone.
    again = model(**inputs(model))
    assert not any("hidden_states" in key for key in again)


def test_retain_grad_hidden_states_attentions(model: Any) -> None:
    output = model(**inputs(model), output_hidden_states=True, output_attentions=True)
    prefix = "encoder_" if _has_encoder(model) else ""
    kept = [output[f"{prefix}hidden_states"][0], output[f"{prefix}attentions"][0]]
    for tensor in kept:
        tensor.retain_grad()
    output.logits.square().sum().backward()
    assert all(tensor.grad is not None and bool(tensor.grad.any()) for tensor in kept)


def test_model_outputs_equivalence(model: Any) -> None:
    arguments = {**inputs(model), "output_hidden_states": True, "output_attentions": True}
    first, second = model(**arguments), model(**arguments, return_dict=False)
    assert isinstance(second, tuple)
    torch.testing.assert_close(first.to_tuple(), second, rtol=0, atol=0)


def test_batching_equivalence(model: Any) -> None:
    together = model(**inputs(model)).logits
    for index in range(3):
        one = {name: ids[index : index + 1] for name, ids in inputs(model).items()}
        torch.testing.assert_close(model(**one).logits[0], together[index], atol=1e-5, rtol=1e-4)


def test_training_gives_every_parameter_a_gradient(model: Any) -> None:
    labels = {"labels": tokens(3, 7, seed=2)}
    model.train()(input_ids=tokens(3, 7), **labels).loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.slow
def test_can_be_compiled(model: Any) -> None:
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**inputs(model)).logits, model(**inputs(model)).logits)


def test_load_save_of_shards_and_in_half_precision(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = type(model).from_pretrained(tmp_path)
    for key, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value), key
    half = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half(**inputs(half)).logits.dtype == torch.bfloat16


def test_beam_sample_generate(model: Any) -> None:
    options = {**GREEDY, "do_sample": True, "num_beams": 2, "num_return_sequences": 2}
    sequences = model.generate(tokens(2, 7), **options)
    assert sequences.shape == (4, 7 if _has_encoder(model) else 13)


def test_generate_dict_outputs(model: Any) -> None:
    requested = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
    options = {**GREEDY, "return_dict_in_generate": True, **dict.fromkeys(requested, True)}
    output = model.generate(tokens(2, 7), **options)
    prefix = "decoder_" if _has_encoder(model) else ""
    for key in ("scores", "logits", f"{prefix}attentions", f"{prefix}hidden_states"):
        assert len(output[key]) == 6
    assert output[f"{prefix}hidden_states"][-1][0].shape == (2, 1, 32)


def test_generate_continue_from_past_key_values(model: Any) -> None:
    if _has_encoder(model):
        pytest.skip("a translation starts anew with each source")
    expected = model.generate(tokens(2, 7), **GREEDY)
    options = {**GREEDY, "max_new_tokens": 3}
    first = model.generate(tokens(2, 7), **options, return_dict_in_generate=True)
    past = first.past_key_values
    continued = model.generate(first.sequences, past_key_values=past, **options)
    assert torch.equal(continued, expected)


@pytest.mark.parametrize("assistant", ["model", "prompt"])
def test_assisted_decoding_matches_greedy_search(model: Any, assistant: str) -> None:
    options = (
        {"assistant_model": model} if assistant == "model" else {"prompt_lookup_num_tokens": 2}
    )
    expected = model.generate(tokens(1, 7), **GREEDY)
    assert torch.equal(model.generate(tokens(1, 7), **GREEDY, **options), expected)


def test_missing_features_are_refused(model: Any) -> None:
    with pytest.raises(UserError, match="embeddings of a ReLUFormer cannot be replaced or resized"):
        model.resize_token_embeddings(44)
    with pytest.raises(UserError, match="input_ids .*must be given.* inputs_embeds"):
        model(inputs_embeds=torch.zeros(1, 3, 32), labels=tokens(1, 3))
    with pytest.raises(ValueError, match="does not support gradient checkpointing"):
        model.gradient_checkpointing_enable()
