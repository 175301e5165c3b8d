"""Tiny models learn to copy and to reverse; a seeded run reproduces its stored losses."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from reluformer.model import AttentionConfig, ModelConfig, ReLUFormer
from reluformer.model.losses import attention_losses, translation_loss

BOS, EOS, COPY, REVERSE, FIRST_SYMBOL, VOCABULARY = 1, 2, 4, 5, 6, 14
STEPS = 600
GOLDEN = Path(__file__).with_name("golden_losses.json")


def examples(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Sources [count, n + 1], a task token and n symbols; target inputs and outputs [.., n + 1]."""
    length = int(torch.randint(2, 7, (1,), generator=generator))
    symbols = torch.randint(FIRST_SYMBOL, VOCABULARY, (count, length), generator=generator)
    reverse = torch.randint(0, 2, (count, 1), generator=generator)
    source = torch.cat([torch.where(reverse == 1, REVERSE, COPY), symbols], dim=1)
    wanted = torch.where(reverse == 1, symbols.flip(1), symbols)
    start, end = torch.full((count, 1), BOS), torch.full((count, 1), EOS)
    return source, torch.cat([start, wanted], dim=1), torch.cat([wanted, end], dim=1)


def tiny(kind: str) -> ReLUFormer:
    config = ModelConfig(
        vocabulary=VOCABULARY,
        width=64,
        heads=4,
        encoder_layers=1,
        decoder_layers=1,
        slots=128,
        dropout=0.0,
        attention=AttentionConfig(kind=kind),
    )
    return ReLUFormer(config)


def calibrate(model: ReLUFormer, generator: torch.Generator) -> None:
    samples = (examples(32, generator) for _ in range(4))
    model.calibrate([{"source": source, "target": target} for source, target, _ in samples])


def step(model: ReLUFormer, optimiser: torch.optim.Optimizer, batch: tuple[Tensor, ...]) -> float:
    source, target_in, target_out = batch
    rectified = model.config.attention.kind == "relu"
    output = model(source, target_in, record="stats" if rectified else "nothing")
    loss, nll = translation_loss(output.logits, target_out, pad_id=0)
    loss, nll = loss / target_out.numel(), nll / target_out.numel()
    if rectified:
        extra = attention_losses(output.records)
        loss = loss + 0.02 * (extra.normalisation + extra.entropy)
    optimiser.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    return nll.item()


@torch.no_grad()
def accuracy(model: ReLUFormer, generator: torch.Generator) -> float:
    """Share of right tokens when the model writes on its own (greedy, cached)."""
    right = total = 0
    for _ in range(8):
        source, _, target_out = examples(64, generator)
        state = model.start(model.encode(source))
        tokens = torch.full((64, 1), BOS)
        for wanted in target_out.T:
            tokens = model.decode(tokens, state).argmax(dim=-1)
            right += int((tokens.squeeze(1) == wanted).sum())
            total += 64
    return right / total


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["relu", "softmax", pytest.param("top_k", marks=pytest.mark.release)]
)
def test_learns_to_copy_and_to_reverse(kind: str) -> None:
    torch.manual_seed(0)
    train, held_out = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    model = tiny(kind)
    calibrate(model, train)
    optimiser = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98))
    for done in range(STEPS):
        for group in optimiser.param_groups:
            group["lr"] = 4e-3 * min(1.0, (done + 1) / 50) * (1 - done / STEPS)
        step(model, optimiser, examples(96, train))
    assert accuracy(model, held_out) > 0.99


def test_golden_losses() -> None:
    """Twenty losses of a seeded float64 run; rewrite the file only for a deliberate change."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = tiny("relu").double()
    calibrate(model, generator)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = [step(model, optimiser, examples(16, generator)) for _ in range(20)]
    assert losses == pytest.approx(json.loads(GOLDEN.read_text()), rel=1e-6)
