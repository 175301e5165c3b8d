"""Eight families of transformers with our attentions: eager softmax is the judge."""

import warnings

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers import (  # noqa: E402  # after the check for the package
    Cache,
    CompileConfig,
    DynamicCache,
    EncoderDecoderCache,
    StaticCache,
)

from tests.hf.families import (  # noqa: E402
    DECODERS,
    FAMILIES,
    GENERATING,
    VOCABULARY,
    build,
    inputs,
    padding,
    tokens,
    valid_logits,
)

RELUS = ("relu", "normalised_relu")


def gradients(model: torch.nn.Module, name: str, left: bool) -> dict[str, Tensor]:
    logits = model(**inputs(name, left)).logits
    weights = torch.linspace(-1, 1, VOCABULARY)[: logits.shape[-1]]
    (valid_logits(name, logits, left) * weights).square().sum().backward()
    return {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


def generate(model: torch.nn.Module, name: str, **options: object) -> Tensor:
    arguments = {"input_ids": tokens(2, 7), "attention_mask": padding(left=True)}
    defaults = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: Tensor = model.generate(**arguments, **{**defaults, **options})
    return found


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_softmax_agrees_with_eager_in_outputs_and_gradients(name: str, left: bool) -> None:
    if left and FAMILIES[name].kind == "image":
        pytest.skip("images have no padding")
    ours, theirs = build(name, "softmax"), build(name, "eager")
    found, expected = (
        valid_logits(name, m(**inputs(name, left)).logits, left) for m in (ours, theirs)
    )
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    found_gradients, expected_gradients = gradients(ours, name, left), gradients(theirs, name, left)
    assert found_gradients.keys() == expected_gradients.keys()
    for key, expected in expected_gradients.items():
        scale = float(expected.abs().max()) + 1e-6
        error = float((found_gradients[key] - expected).abs().max())
        assert error < 1e-3 * scale + 1e-5, key


@pytest.mark.parametrize("name", GENERATING)
def test_softmax_generates_the_tokens_of_eager(name: str) -> None:
    ours, theirs = build(name, "softmax"), build(name, "eager")
    assert torch.equal(generate(ours, name), generate(theirs, name))
    beams = {"num_beams": 3}
    assert torch.equal(generate(ours, name, **beams), generate(theirs, name, **beams))


@pytest.mark.parametrize("attention", RELUS)
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize(
    "name", [n for n, f in FAMILIES.items() if f.kind in ("decoder", "encoder")]
)
def test_padding_changes_nothing(name: str, left: bool, attention: str) -> None:
    if left and FAMILIES[name].kind == "encoder":
        pytest.skip("BERT's positions count from the left edge")
    model = build(name, attention)
    padded = model(**inputs(name, left)).logits[1][padding(left)[1].bool()]
    alone = model(input_ids=tokens(2, 7)[1:, padding(left)[1].bool()]).logits[0]
    torch.testing.assert_close(padded, alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["marian", "bart", "t5"])
def test_padding_of_the_source_changes_nothing(name: str) -> None:
    model = build(name, "normalised_relu")
    arguments = inputs(name)
    padded = model(**arguments).logits[1]
    alone = model(
        input_ids=arguments["input_ids"][1:, :5],
        decoder_input_ids=arguments["decoder_input_ids"][1:],
    ).logits[0]
    torch.testing.assert_close(padded, alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("name", [n for n, f in FAMILIES.items() if f.kind != "image"])
def test_padding_is_not_read(name: str, left: bool) -> None:
    model, arguments = build(name, "relu"), inputs(name, left)
    logits = valid_logits(name, model(**arguments).logits, left)
    others = tokens(2, 7, seed=9).where(padding(left) == 0, arguments["input_ids"])
    assert not torch.equal(others, arguments["input_ids"])
    changed = model(**{**arguments, "input_ids": others}).logits
    torch.testing.assert_close(valid_logits(name, changed, left), logits, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("attention", RELUS)
@pytest.mark.parametrize("name", GENERATING)
def test_the_future_changes_nothing(name: str, attention: str) -> None:
    model = build(name, attention)
    key = "input_ids" if name in DECODERS else "decoder_input_ids"
    fixed = {} if name in DECODERS else {"input_ids": tokens(1, 7)}
    ids = tokens(1, 9)
    changed = ids.clone()
    changed[:, 6:] = tokens(1, 3, seed=5)
    first, second = (model(**fixed, **{key: i}).logits for i in (ids, changed))
    torch.testing.assert_close(first[:, :6], second[:, :6], atol=1e-6, rtol=1e-5)
    assert not torch.allclose(first[:, 6:], second[:, 6:], atol=1e-3)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", GENERATING)
def test_n_is_right_in_every_cache(name: str, kind: str) -> None:
    """The weights of relu_n are divided by n."""
    model, ids = build(name, "relu_n"), tokens(2, 9)

    def cache(slots: int) -> Cache:
        if kind == "dynamic":
            return DynamicCache(config=model.config)
        return StaticCache(config=model.config, max_cache_len=slots)

    if name in DECODERS:
        expected, past, fixed = model(input_ids=ids).logits, cache(16), {}
    else:
        source = tokens(2, 7)
        expected = model(input_ids=source, decoder_input_ids=ids).logits
        fixed = {"encoder_outputs": model.get_encoder()(source)}
        past = EncoderDecoderCache(cache(16), cache(7))
    key = "input_ids" if name in DECODERS else "decoder_input_ids"
    logits, first = [], 0
    for end in (4, 5, 6, 9):
        output = model(**fixed, **{key: ids[:, first:end]}, past_key_values=past)
        logits.append(output.logits)
        first = end
    torch.testing.assert_close(torch.cat(logits, dim=1), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("attention", RELUS)
@pytest.mark.parametrize("name", GENERATING)
def test_every_cache_generates_the_tokens_of_no_cache(name: str, attention: str) -> None:
    model = build(name, attention)
    expected = generate(model, name, use_cache=False)
    assert torch.equal(generate(model, name), expected)
    beams = generate(model, name, num_beams=2, use_cache=False)
    assert torch.equal(generate(model, name, num_beams=2), beams)
    if name != "qwen2":
        # The window of Qwen is in the dynamic cache above and in the next test.
        assert torch.equal(generate(model, name, cache_implementation="static"), expected)


def test_a_sliding_window_in_a_static_cache() -> None:
    model = build("qwen2", "relu")
    expected = generate(model, "qwen2", use_cache=False, max_new_tokens=9)
    static = generate(model, "qwen2", cache_implementation="static", max_new_tokens=9)
    assert torch.equal(static, expected)


@pytest.mark.slow
def test_compiled_steps_of_a_static_cache() -> None:
    """On a GPU transformers compiles them by itself."""
    torch.compiler.reset()
    model = build("llama", "normalised_relu")
    graphs: list[object] = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    config = CompileConfig(backend=count, mode=None)
    config._compile_all_devices = True
    static = {"cache_implementation": "static", "compile_config": config}
    assert torch.equal(generate(model, "llama", **static), generate(model, "llama"))
    assert len(graphs) == 1


@pytest.mark.parametrize("name", FAMILIES)
def test_maps_are_returned_and_n_is_the_number_of_visible_keys(name: str) -> None:
    # relu_n has weights ReLU(s) / n: maps under n = 1, its exponent 0, differ by the factor n.
    counted = build(name, "relu_n")(**inputs(name), output_attentions=True)
    plain = build(name, "relu_n", length_exponent=0.0)(**inputs(name), output_attentions=True)
    kind = FAMILIES[name].kind
    key = "encoder_attentions" if kind == "seq2seq" else "attentions"
    first, unscaled = counted[key][0], plain[key][0]
    assert len(counted[key]) == 2 and first.shape == unscaled.shape
    visible = torch.full(first.shape[:3], first.shape[-1])
    if kind != "image":
        lengths = padding(False).sum(dim=-1)[:, None, None]
        rows = torch.arange(1, 8)[None, None, :]
        n = torch.minimum(lengths, rows) if kind == "decoder" else lengths
        visible = n.expand(first.shape[:3])
    torch.testing.assert_close(first * visible[..., None], unscaled, atol=1e-6, rtol=1e-4)
    assert bool((unscaled > 0).any())


@pytest.mark.parametrize("name", ["marian", "t5", "gpt2"])
def test_decoder_and_cross_attention_maps(name: str) -> None:
    output = build(name, "normalised_relu")(**inputs(name), output_attentions=True)
    if FAMILIES[name].kind == "seq2seq":
        assert output.cross_attentions[0].shape == (2, 4, 6, 7)
        assert float(output.cross_attentions[0][1, :, :, 5:].abs().max()) == 0
        maps = output.decoder_attentions[0]
    else:
        maps = output.attentions[0]
    assert float(maps.triu(1).abs().max()) == 0
    sums = maps.sum(dim=-1)[0]
    # A row may be dead or nearly dead at random weights: T5 does not scale its scores.
    live = sums > 0.5
    torch.testing.assert_close(sums[live], torch.ones_like(sums[live]), atol=5e-2, rtol=0)
    assert float(live.float().mean()) > 0.5


def test_packed_positions_equal_separate_sequences() -> None:
    model = build("llama", "normalised_relu")
    first, second = tokens(1, 5), tokens(1, 4, seed=1)
    packed = torch.cat([first, second], dim=1)
    positions = torch.cat([torch.arange(5), torch.arange(4)])[None]
    logits = model(input_ids=packed, position_ids=positions, use_cache=False).logits
    expected = torch.cat([model(input_ids=ids).logits for ids in (first, second)], dim=1)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
    # Maps, and attentions without a packed form, take the mask of the packed sequences.
    other = build("llama", "ssmax")
    logits = other(input_ids=packed, position_ids=positions, use_cache=False).logits
    expected = torch.cat([other(input_ids=ids).logits for ids in (first, second)], dim=1)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)


def test_gradient_checkpointing_changes_no_gradient() -> None:
    found = []
    for checkpointing in (False, True):
        model = build("llama", "normalised_relu").train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        ids = tokens(2, 7)
        model(input_ids=ids, labels=ids).loss.backward()
        found.append({key: p.grad for key, p in model.named_parameters()})
    assert any("threshold_offset" in key for key in found[0])
    for key, gradient in found[0].items():
        torch.testing.assert_close(found[1][key], gradient, atol=1e-6, rtol=1e-4)
