"""Creating, saving, loading and changing transformers models with our attentions."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from reluformer import ATTENTIONS  # noqa: E402  # after the check for the package
from reluformer.errors import UserError  # noqa: E402
from reluformer.hf import prepare, register, replace_attention_modules  # noqa: E402
from reluformer.hf.layers import layer_attentions  # noqa: E402
from reluformer.nn import replace_attention  # noqa: E402
from tests.hf.families import DECODERS, FAMILIES, build, inputs, tokens  # noqa: E402


def test_every_attention_has_its_own_name() -> None:
    names = register()
    assert set(names) == set(ATTENTIONS) >= {"relu", "normalised_relu", "softmax"}
    functions = transformers.AttentionInterface()
    assert set(names) <= set(functions.valid_keys())
    # transformers dispatches on these parts of a name.
    for part in ("flash", "sdpa", "flex_attention", "eager", "/", "|"):
        assert not any(part in name for name in names)


@pytest.mark.parametrize("attention", sorted(ATTENTIONS))
def test_every_attention_learns_in_a_model(attention: str) -> None:
    model = build("llama", attention).train()
    ids = tokens(2, 7)
    model(input_ids=ids, labels=ids).loss.backward()
    learned = {k: p for k, p in model.named_parameters() if "reluformer" in k}
    assert bool(learned) == bool(ATTENTIONS[attention].learned)
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in learned.values())


@pytest.mark.parametrize("name", FAMILIES)
def test_a_saved_model_loads_with_its_attention(name: str, tmp_path: Path) -> None:
    model = build(name, "normalised_relu", power=2)
    for layer in layer_attentions(model):
        torch.nn.init.uniform_(layer.threshold_offset, -0.5, 0.5)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == f"reluformer_{FAMILIES[name].config().model_type}"
    loaded = FAMILIES[name].auto.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert loaded.config._attn_implementation == "normalised_relu"
    assert layer_attentions(loaded)[0].fixed_options == {"power": 2}
    arguments = inputs(name)
    torch.testing.assert_close(loaded.eval()(**arguments).logits, model(**arguments).logits)
    again = type(model).from_pretrained(tmp_path)
    assert again.config._attn_implementation == "normalised_relu"


@pytest.mark.slow
@pytest.mark.parametrize("loader", ["AutoModelForCausalLM", "LlamaForCausalLM"])
def test_without_this_package_a_saved_model_is_refused(loader: str, tmp_path: Path) -> None:
    build("llama", "relu").save_pretrained(tmp_path)
    script = f"from transformers import {loader} as L; L.from_pretrained({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode != 0
    named = "reluformer_llama" if loader.startswith("Auto") else 'attn_implementation="relu"'
    assert named in done.stderr.replace("`", '"').replace('""', '"') or named in done.stderr


def test_a_softmax_model_saves_and_loads_as_before(tmp_path: Path) -> None:
    build("llama", "sdpa").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "llama" and "attn_implementation" not in config


@pytest.mark.parametrize("name", DECODERS)
def test_weights_of_a_softmax_model_load_into_a_relu_model(name: str, tmp_path: Path) -> None:
    original = build(name, "sdpa")
    original.save_pretrained(tmp_path)
    model = FAMILIES[name].auto.from_pretrained(tmp_path, attn_implementation="normalised_relu")
    layers = layer_attentions(model)
    assert len(layers) == 2
    assert all(bool((p == 0).all()) for layer in layers for p in layer.parameters())
    converted = replace_attention_modules(original)
    assert len(converted.changed) == 2 and not converted.unchanged
    ids = tokens(1, 6)
    torch.testing.assert_close(model.eval()(ids).logits, original.eval()(ids).logits)


def test_changing_the_attention_changes_the_learned_options() -> None:
    model = build("llama", "sdpa")
    model.set_attn_implementation("sink")
    assert [type(layer).__name__ for layer in layer_attentions(model)] == ["LayerAttention"] * 2
    assert layer_attentions(model)[0].row.name == "sink"
    model.set_attn_implementation("normalised_relu")
    assert hasattr(layer_attentions(model)[0], "threshold_offset")
    model.set_attn_implementation("sdpa")
    assert not layer_attentions(model)


def test_options_are_an_argument_of_from_pretrained(tmp_path: Path) -> None:
    build("llama", "sdpa").save_pretrained(tmp_path)
    assert "attention_options" not in (tmp_path / "config.json").read_text()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="normalised_relu", attention_options={"power": 2}
    )
    assert [layer.fixed_options for layer in layer_attentions(model)] == [{"power": 2}] * 2


def test_an_optimizer_sees_the_thresholds() -> None:
    model = build("llama", "normalised_relu")
    keys = [key for key, _ in model.named_parameters() if key.endswith("threshold_offset")]
    assert len(keys) == 2 and prepare(model) is model
    assert keys == [k for k, _ in model.named_parameters() if k.endswith("threshold_offset")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: replace_attention_modules(m, "rellu"), "unknown attention 'rellu'"),
        (lambda m: replace_attention_modules(m, "relu", {"powr": 2}), "powr"),
        (
            lambda m: replace_attention_modules(m, "softmax", {"row_loss": 1.0}),
            "row_loss must be 0",
        ),
    ],
)
def test_mistakes_are_one_sentence(change: object, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        change(build("llama", "sdpa"))  # type: ignore[operator]
    assert "\n" not in str(caught.value)


def test_sinks_and_soft_caps_are_refused() -> None:
    model = build("llama", "relu")
    module = model.model.layers[0].self_attn
    q = torch.randn(1, 4, 3, 8)
    function = transformers.AttentionInterface()["relu"]
    for name in ("softcap", "s_aux"):
        with pytest.raises(UserError, match=f"LlamaAttention passes {name}"):
            function(module, q, q, q, None, **{name: 1.0})
    del module.reluformer
    with pytest.raises(UserError, match="reluformer.hf.prepare"):
        function(module, q, q, q, None)


def test_an_additive_mask_hides_keys_and_biases_scores() -> None:
    model = build("llama", "softmax")
    reference = build("llama", "eager")
    mask = torch.zeros(1, 1, 5, 5).masked_fill(
        torch.ones(5, 5).triu(1).bool(), torch.finfo(torch.float32).min
    )
    mask = mask + 0.3 * torch.randn(5, 5, generator=torch.Generator().manual_seed(0)).tril()
    ids = tokens(1, 5)
    found, expected = (m(input_ids=ids, attention_mask=mask).logits for m in (model, reference))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("hidden", [-torch.inf, torch.finfo(torch.float32).min])
def test_a_float_mask_without_bias_runs_on_a_fused_backend(hidden: float) -> None:
    model, ids = build("llama", "normalised_relu", impl="cpu"), tokens(2, 5)
    visible = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    visible[1, 0, 3:, 1] = False
    wanted = model(input_ids=ids, attention_mask=visible).logits
    mask = torch.zeros(visible.shape).masked_fill(~visible, hidden)
    torch.testing.assert_close(model(input_ids=ids, attention_mask=mask).logits, wanted)


@pytest.mark.slow
def test_a_compiled_model_agrees() -> None:
    model = build("llama", "normalised_relu").train()
    ids = tokens(2, 8)
    expected = model(input_ids=ids, labels=ids, use_cache=False).loss
    expected.backward()
    gradients = {key: p.grad.clone() for key, p in model.named_parameters()}
    model.zero_grad()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    loss = compiled(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[key], atol=1e-6, rtol=1e-4)


def test_the_drop_in_function_replaces_attentions_of_transformers() -> None:
    model = build("llama", "sdpa")
    report = replace_attention(model, "normalised_relu", power=2)
    assert "model.layers.1.self_attn" in str(report)
    assert [layer.fixed_options for layer in layer_attentions(model)] == [{"power": 2}] * 2


def test_both_halves_of_a_composite_model_load_with_their_attention(tmp_path: Path) -> None:
    encoder, decoder = (FAMILIES[name].config() for name in ("bert", "gpt2"))
    decoder.is_decoder = decoder.add_cross_attention = True
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    auto = transformers.AutoModelForSeq2SeqLM
    model = auto.from_config(config, attn_implementation="normalised_relu").eval()
    assert len(layer_attentions(model)) == 6
    model.save_pretrained(tmp_path)
    loaded = auto.from_pretrained(tmp_path)
    halves = (loaded, loaded.encoder, loaded.decoder)
    assert {half.config._attn_implementation for half in halves} == {"normalised_relu"}
    arguments = {"input_ids": tokens(1, 5), "decoder_input_ids": tokens(1, 4, seed=1)}
    torch.testing.assert_close(loaded.eval()(**arguments).logits, model(**arguments).logits)


def test_copies_have_their_own_gates() -> None:
    model = build("llama", "gated")
    copied, ids = copy.deepcopy(model), tokens(1, 5)
    assert torch.equal(copied(ids).logits, model(ids).logits)
    torch.nn.init.constant_(layer_attentions(copied)[0].gate_projection.bias, -9.0)
    assert not torch.allclose(copied(ids).logits, model(ids).logits)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_the_attention_of_both_stacks_can_be_changed_and_saved(name: str, tmp_path: Path) -> None:
    model, arguments = build(name, "sdpa"), inputs(name)
    model.config.attention_options = {"gamma": 0.5}
    model.set_attn_implementation("relu")
    expected = model(**arguments).logits
    assert [layer.fixed_options for layer in layer_attentions(model)] == [{"gamma": 0.5}] * 6
    torch.testing.assert_close(expected, build(name, "relu", gamma=0.5)(**arguments).logits)
    model.save_pretrained(tmp_path / "relu")
    loaded = FAMILIES[name].auto.from_pretrained(tmp_path / "relu").eval()
    torch.testing.assert_close(loaded(**arguments).logits, expected)
    model.set_attn_implementation("eager")
    expected = build(name, "eager")(**arguments).logits
    assert not layer_attentions(model)
    torch.testing.assert_close(model(**arguments).logits, expected)
    model.save_pretrained(tmp_path / "eager")
    loaded = FAMILIES[name].auto.from_pretrained(tmp_path / "eager").eval()
    assert not layer_attentions(loaded)
    torch.testing.assert_close(loaded(**arguments).logits, expected)


def test_the_drop_in_function_replaces_both_stacks_of_t5() -> None:
    model = build("t5", "sdpa")
    report = replace_attention(model, "relu")
    assert len(report.changed) == len(layer_attentions(model)) == 6 and not report.unchanged
