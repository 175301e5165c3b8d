"""The models: dependence on padding, batch and later tokens, and cached decoding."""

import pytest
import torch
from torch import Tensor

from reluformer import ATTENTIONS
from reluformer.model import AttentionConfig, ModelConfig, ReLUFormer, ReLUFormerLM
from reluformer.model.memory import MEMORIES
from tests.model.factory import batch, small, tokens

SHAPES = [
    {"norm": "pre", "positions": "rotary", "kv_heads": 2, "attention_qk_norm": True},
    {
        "norm": "post",
        "positions": "sinusoidal",
        "tie_embeddings": False,
        "attention_output_norm": True,
    },
]


def decode_stepwise(model: ReLUFormer, inputs: dict[str, Tensor], pieces: list[int]) -> Tensor:
    state = model.start(model.encode(inputs["source"], inputs["source_lengths"]))
    return torch.cat([model.decode(p, state) for p in inputs["target"].split(pieces, dim=1)], dim=1)


@pytest.mark.parametrize("shape", SHAPES, ids=["pre-rotary-grouped", "post-sinusoidal"])
@pytest.mark.parametrize("kind", ATTENTIONS)
def test_cached_decoding_equals_full_decoding(kind: str, shape: dict[str, object]) -> None:
    model = ReLUFormer(small(kind, **shape)).double().eval()
    inputs = batch()
    full = model(**inputs).logits
    stepwise = decode_stepwise(model, inputs, [1, 1, 3, 1, 1])
    torch.testing.assert_close(stepwise, full, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("memory", MEMORIES)
def test_every_memory_works_in_both_models(memory: str) -> None:
    config = small(slots=64, memory=memory)
    inputs = batch()
    model = ReLUFormer(config).double().eval()
    stepwise = decode_stepwise(model, inputs, [1] * 7)
    torch.testing.assert_close(stepwise, model(**inputs).logits, rtol=1e-9, atol=1e-9)
    language = ReLUFormerLM(config).double().eval()
    state = language.start()
    steps = [language.decode(column, state) for column in inputs["target"].split(1, dim=1)]
    full = language(inputs["target"]).logits
    torch.testing.assert_close(torch.cat(steps, dim=1), full, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_results_do_not_depend_on_padding_and_the_rest_of_the_batch(kind: str) -> None:
    model = ReLUFormer(small(kind)).double().eval()
    inputs = batch()
    together = model(**inputs).logits
    for b in range(3):
        s, t = int(inputs["source_lengths"][b]), int(inputs["target_lengths"][b])
        alone = model(inputs["source"][b : b + 1, :s], inputs["target"][b : b + 1, :t]).logits
        torch.testing.assert_close(together[b : b + 1, :t], alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_results_do_not_depend_on_later_tokens(kind: str) -> None:
    model = ReLUFormer(small(kind)).double().eval()
    inputs = batch()
    changed = {**inputs, "target": inputs["target"].clone()}
    changed["target"][:, 4:] = tokens(3, 3)
    before, after = model(**inputs).logits, model(**changed).logits
    torch.testing.assert_close(after[:, :4], before[:, :4], rtol=0, atol=1e-12)
    assert not torch.allclose(after[0, 4:], before[0, 4:])


def test_beams_share_the_source() -> None:
    """Two hypotheses a sentence give what each would give with a source of its own."""
    model = ReLUFormer(small()).double().eval()
    source, lengths = tokens(2, 6), torch.tensor([6, 4])
    hypotheses = tokens(4, 5)
    state = model.start(model.encode(source, lengths))
    shared = model.decode(hypotheses, state)
    repeated = model(source.repeat_interleave(2, 0), hypotheses, lengths.repeat_interleave(2, 0))
    torch.testing.assert_close(shared, repeated.logits, rtol=1e-9, atol=1e-9)


def test_decoder_states_can_be_reordered_and_reduced() -> None:
    model = ReLUFormer(small()).double().eval()
    source, lengths, hypotheses = tokens(3, 6), torch.tensor([6, 4, 5]), tokens(6, 20)
    state = model.start(model.encode(source, lengths))
    model.decode(hypotheses[:, :19], state)
    state.select_rows(torch.tensor([1, 0, 2, 2, 5, 4]))
    state.select_sentences(torch.tensor([2, 0]))
    rows = torch.tensor([5, 4, 1, 0])
    continued = model.decode(hypotheses[rows, 19:], state)
    sentences = rows // 2
    full = model(source[sentences], hypotheses[rows], lengths[sentences]).logits[:, 19:]
    torch.testing.assert_close(continued, full, rtol=1e-9, atol=1e-9)


def test_an_empty_source_gives_finite_logits() -> None:
    """A source without a single token: cross-attention reads nothing, and nothing is NaN."""
    model = ReLUFormer(small())
    output = model(tokens(2, 3), tokens(2, 4), torch.tensor([0, 3]), record="stats")
    output.logits.sum().backward()
    assert torch.isfinite(output.logits).all()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())


def test_sites_can_have_different_attentions() -> None:
    config = small(cross_attention=small("softmax").attention, attention_threshold_init=0.0)
    records = ReLUFormer(config)(**batch(), record="stats").records
    kinds = {record.site: float(record.stats.zeros.max()) for record in records}
    assert kinds["cross"] == 0 and kinds["encoder"] > 0


def branch_variance(length: int, length_exponent: float, independent: bool) -> float:
    """Variance of an attention branch at its start, over random tokens.

    `independent` makes keys and values read different features, as the paper's analysis assumes.
    """
    torch.manual_seed(0)
    config = small(
        width=64,
        attention=AttentionConfig.paper(length_exponent=length_exponent, qk_norm=True),
    )
    attention = ReLUFormer(config).encoder[0].self_attention.attention
    with torch.no_grad():
        if independent:
            attention.key_value.weight[:64, 32:] = 0
            attention.key_value.weight[64:, :32] = 0
        return float(attention(torch.randn(4, length, 64)).output.var())


def test_plain_relu_variance_grows_with_length_and_scaled_does_not() -> None:
    """Section 4.1 of the paper, in the attention of a model."""
    plain, scaled = (
        branch_variance(1024, exponent, True) / branch_variance(64, exponent, True)
        for exponent in (0.0, 0.5)
    )
    assert 10 < plain < 25
    assert 0.7 < scaled < 1.5


def test_scaled_variance_still_grows_when_keys_and_values_share_their_token() -> None:
    """The paper assumes independence, but E[ReLU(q.k) v] is not 0, and n such terms add coherently.

    Only weights that sum to a constant (length_exponent 1) keep that part bounded.
    """
    scaled, summed = (
        branch_variance(1024, exponent, False) / branch_variance(256, exponent, False)
        for exponent in (0.5, 1.0)
    )
    assert scaled > 2
    assert 0.6 < summed < 1.2


def test_half_precision_and_autocast() -> None:
    inputs = batch()
    model = ReLUFormer(small(attention_qk_norm=True)).eval()
    expected = model(**inputs).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(model(**inputs).logits.float(), expected, rtol=0.1, atol=0.1)
    half = model.bfloat16()(**inputs).logits
    torch.testing.assert_close(half.float(), expected, rtol=0.1, atol=0.1)


def test_compiles_without_graph_breaks() -> None:
    model = ReLUFormer(small()).eval()
    inputs = batch()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits)


def test_language_model_ignores_the_encoder() -> None:
    names = dict(ReLUFormerLM(small()).named_parameters())
    assert names and not any("encoder" in name or "cross" in name for name in names)


def test_tying_shares_one_table() -> None:
    tied, free = ReLUFormer(small()), ReLUFormer(small(tie_embeddings=False))
    extra = sum(p.numel() for p in free.parameters()) - sum(p.numel() for p in tied.parameters())
    config: ModelConfig = tied.config
    assert extra == 2 * config.vocabulary * config.width
