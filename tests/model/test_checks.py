"""Tokens and lengths that no model takes are refused in one sentence, and leave no trace."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from reluformer.errors import UserError
from reluformer.model import ModelConfig, ReLUFormer, ReLUFormerLM

CONFIG = ModelConfig(vocabulary=50, width=16, heads=2, slots=16, encoder_layers=1, decoder_layers=1)
TOKENS = torch.arange(10).view(2, 5) + 3
MODEL, LANGUAGE = ReLUFormer(CONFIG).eval(), ReLUFormerLM(CONFIG).eval()

Take = Callable[[Any], object]
PLACES: dict[str, Take] = {
    "source": lambda tokens: MODEL(tokens, TOKENS),
    "target": lambda tokens: MODEL(TOKENS, tokens),
    "encode": lambda tokens: MODEL.encode(tokens),
    "decode": lambda tokens: MODEL.decode(tokens, MODEL.start(MODEL.encode(TOKENS))),
    "language": lambda tokens: LANGUAGE(tokens),
    "continued": lambda tokens: LANGUAGE.decode(tokens, LANGUAGE.start()),
    "generated": lambda tokens: LANGUAGE.generate(tokens, max_new_tokens=2),
}
WRONG: dict[str, tuple[Any, str]] = {
    "1-D": (TOKENS[0], r"must be token ids \[B, T\] .*shape \[5\]"),
    "0-D": (TOKENS[0, 0], r"must be token ids \[B, T\]"),
    "3-D": (TOKENS[None], r"must be token ids \[B, T\]"),
    "float": (TOKENS.float(), "in int64 or int32, got torch.float32"),
    "bool": (TOKENS > 4, "in int64 or int32, got torch.bool"),
    "uint8": (TOKENS.to(torch.uint8), "in int64 or int32, got torch.uint8"),
    "list": ([[3, 4]], "must be a tensor of token ids .*, got list"),
    "None": (None, "must be a tensor of token ids .*, got NoneType"),
    "too large": (TOKENS + 41, "must hold ids from 0 to 49, got 53"),
    "negative": (TOKENS - 9, "must hold ids from 0 to 49, got -6"),
    "meta": (TOKENS.to("meta"), "must be on cpu as the model is, got a tensor on meta"),
    "sparse": (TOKENS.to_sparse(), "must be a dense tensor"),
}
LENGTHS: dict[str, Take] = {
    "source_lengths": lambda lengths: MODEL(TOKENS, TOKENS, lengths),
    "target_lengths": lambda lengths: MODEL(TOKENS, TOKENS, None, lengths),
    "lengths": lambda lengths: LANGUAGE(TOKENS, lengths),
    "generated": lambda lengths: LANGUAGE.generate(TOKENS, lengths, max_new_tokens=2),
}


@pytest.mark.parametrize("tokens", WRONG)
@pytest.mark.parametrize("place", PLACES)
def test_wrong_tokens(place: str, tokens: str) -> None:
    value, message = WRONG[tokens]
    with pytest.raises(UserError, match=message) as refused:
        PLACES[place](value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "lengths",
    [
        torch.tensor([3]),
        torch.tensor(3),
        torch.tensor([3.0, 2.0]),
        [3, 2],
        torch.tensor([3, 2], device="meta"),
    ],
    ids=str,
)
@pytest.mark.parametrize("place", LENGTHS)
def test_wrong_lengths(place: str, lengths: Any) -> None:
    with pytest.raises(UserError, match="lengths must be"):
        LENGTHS[place](lengths)


@pytest.mark.parametrize("target", [TOKENS[:1], TOKENS[[0, 1, 1]], TOKENS.repeat(2, 1)], ids=str)
def test_another_batch_size(target: Tensor) -> None:
    with pytest.raises(UserError, match="target must have the batch size of source, 2"):
        MODEL(TOKENS, target)


def test_a_refused_step_leaves_the_state_as_it_was() -> None:
    first = [TOKENS[:, :1], TOKENS[:, 1:2]]
    state, clean = (MODEL.start(MODEL.encode(TOKENS)) for _ in range(2))
    MODEL.decode(first[0], state)
    for wrong in (TOKENS[0], TOKENS[[0, 1, 1]], TOKENS[:0], TOKENS + 99):
        with pytest.raises(UserError):
            MODEL.decode(wrong, state)
    MODEL.decode(first[0], clean)
    assert torch.equal(MODEL.decode(first[1], state), MODEL.decode(first[1], clean))


def test_int32_ids_and_empty_batches_pass() -> None:
    assert torch.equal(MODEL(TOKENS.int(), TOKENS.int()).logits, MODEL(TOKENS, TOKENS).logits)
    wide = LANGUAGE.generate(TOKENS, max_new_tokens=3)
    narrow = LANGUAGE.generate(TOKENS.int(), max_new_tokens=3)
    assert torch.equal(wide.tokens, narrow.tokens)
    assert MODEL(TOKENS[:0], TOKENS[:0]).logits.shape == (0, 5, 50)
    assert LANGUAGE(TOKENS[:, :0]).logits.shape == (2, 0, 50)
