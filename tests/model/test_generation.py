"""Generation: greedy, sampled, from ragged prompts, with and without the paged cache."""

from typing import Any

import pytest
import torch

from reluformer import ATTENTIONS
from reluformer.errors import UserError
from reluformer.model import AttentionConfig, ReLUFormerLM, generation
from reluformer.model.generation import Generated
from tests.model.factory import small, tokens

PAGED = ("relu", "normalised_relu", "relu_n", "squared_relu", "squared_relu_n2")
LENGTHS = torch.tensor([9, 1, 5])


def language_model(kind: str = "relu", **changes: Any) -> ReLUFormerLM:
    torch.manual_seed(3)
    model = ReLUFormerLM(small(kind, **changes)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def both(model: ReLUFormerLM, **options: Any) -> tuple[Generated, Generated]:
    """Generations with and without the cache, from prompts of different lengths."""
    prompts = tokens(3, 9)
    cached, uncached = (
        model.generate(prompts, LENGTHS, max_new_tokens=24, use_cache=use_cache, **options)
        for use_cache in (True, False)
    )
    return cached, uncached


@pytest.mark.parametrize("positions", ["sinusoidal", "rotary"])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_heads": 1, "norm": "post"},
        {"attention": AttentionConfig.paper()},
        {"attention_qk_norm": True, "attention_output_norm": True, "attention_gamma": "head"},
    ],
    ids=["default", "shared-heads", "paper", "norms"],
)
def test_cached_generation_equals_uncached(
    positions: str, sampled: bool, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "PAGE_SIZE", 16)
    model = language_model(positions=positions, **changes)
    options = {"temperature": 1.5, "top_k": 9, "top_p": 0.95, "seed": 4} if sampled else {}
    cached, uncached = both(model, **options)
    assert torch.equal(cached.tokens, uncached.tokens)
    assert torch.equal(cached.lengths, uncached.lengths)
    assert cached.lengths.max() > LENGTHS.max() + 8


@pytest.mark.parametrize("kind", PAGED)
def test_every_kind_with_pages_generates_the_same(kind: str) -> None:
    cached, uncached = both(language_model(kind))
    assert torch.equal(cached.tokens, uncached.tokens)


def test_ragged_prompts_are_independent() -> None:
    model, prompts = language_model(), tokens(3, 9)
    together = model.generate(prompts, LENGTHS, max_new_tokens=12)
    for row, length in enumerate(LENGTHS.tolist()):
        alone = model.generate(prompts[row : row + 1, :length], max_new_tokens=12)
        end = int(alone.lengths)
        assert together.lengths[row] == end
        assert torch.equal(together.tokens[row, :end], alone.tokens[0])
        assert torch.equal(together.tokens[row, :length], prompts[row, :length])
        assert (together.tokens[row, end:] == model.config.pad_id).all()


def test_greedy_tokens_are_the_most_likely() -> None:
    model, prompts = language_model(), tokens(2, 4)
    text, lengths = model.generate(prompts, max_new_tokens=6)
    best = model(text).logits.argmax(-1)
    for row, length in enumerate(lengths.tolist()):
        assert torch.equal(text[row, 4:length], best[row, 3 : length - 1])


def test_the_end_token_ends_a_sequence() -> None:
    model, prompts = language_model(tie_embeddings=False), tokens(3, 9)
    end = model.config.eos_id
    assert model.output is not None
    with torch.no_grad():
        model.output.weight[end] = 0
    free = model.generate(prompts, LENGTHS, max_new_tokens=5)
    third = int(free.tokens[0, LENGTHS[0] + 2])
    with torch.no_grad():
        model.output.weight[end] = model.output.weight[third]
        model.output.weight[third] = 0
    for use_cache in (True, False):
        text, lengths = model.generate(prompts, LENGTHS, max_new_tokens=5, use_cache=use_cache)
        for row, length in enumerate(lengths.tolist()):
            new = text[row, LENGTHS[row] : length].tolist()
            assert end not in new[:-1] and (new[-1] == end or len(new) == 5)
        assert text[0, lengths[0] - 1] == end and lengths[0] <= LENGTHS[0] + 3


def test_sampling_depends_on_the_seed_and_the_temperature() -> None:
    model, prompts = language_model(), tokens(4, 3)
    greedy = model.generate(prompts, max_new_tokens=16)
    cold = model.generate(prompts, max_new_tokens=16, temperature=1e-4)
    only = model.generate(prompts, max_new_tokens=16, temperature=2.0, top_k=1)
    assert torch.equal(greedy.tokens, cold.tokens) and torch.equal(greedy.tokens, only.tokens)
    first, again, other = (
        model.generate(prompts, max_new_tokens=16, temperature=2.0, seed=seed).tokens
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again) and first.tolist() != other.tolist()


@pytest.mark.parametrize("kind", sorted(set(ATTENTIONS) - set(PAGED)))
def test_other_kinds_generate_without_a_cache(kind: str) -> None:
    model = language_model(kind)
    assert model.generate(tokens(2, 3), max_new_tokens=2).tokens.shape[1] <= 5
    with pytest.raises(UserError, match=f"use_cache must be False or None with {kind} attention"):
        model.generate(tokens(2, 3), max_new_tokens=2, use_cache=True)


def test_persistent_slots_generate_without_a_cache() -> None:
    model = language_model("softmax", memory="persistent")
    assert model.generate(tokens(2, 3), max_new_tokens=2).tokens.shape[1] <= 5


def test_the_mode_of_the_model_is_restored() -> None:
    model = language_model().train()
    result = model.generate(tokens(2, 3), max_new_tokens=2)
    assert model.training and not result.tokens.requires_grad


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"max_new_tokens": 1, "temperature": -1.0}, "temperature must be at least 0"),
        ({"max_new_tokens": 1, "top_k": 0}, "top_k must be at least 1, got 0"),
        ({"max_new_tokens": 1, "top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"max_new_tokens": 1, "lengths": torch.tensor([3, 0])}, "numbers from 1 to 3"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        language_model().generate(tokens(2, 3), **options)
