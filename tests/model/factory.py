"""Small models and batches for the tests of the models."""

from typing import Any

import torch
from torch import Tensor

from reluformer.model import AttentionConfig, ModelConfig

VOCABULARY = 30


def small(kind: str = "relu", **changes: Any) -> ModelConfig:
    """A 2+2-layer model of width 16; `attention` fields by the prefix `attention_`."""
    inner = {
        k.removeprefix("attention_"): changes.pop(k)
        for k in list(changes)
        if k.startswith("attention_")
    }
    settings: dict[str, Any] = {
        "vocabulary": VOCABULARY,
        "width": 16,
        "heads": 4,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "slots": 24,
        "dropout": 0.0,
        "attention": AttentionConfig(kind=kind, **inner),
    }
    return ModelConfig(**{**settings, **changes})


def tokens(*shape: int) -> Tensor:
    """Random tokens that are not special."""
    return torch.randint(4, VOCABULARY, shape)


def batch() -> dict[str, Tensor]:
    """Three sources and targets of different lengths, padded."""
    source, target = tokens(3, 9), tokens(3, 7)
    source_lengths, target_lengths = torch.tensor([9, 5, 2]), torch.tensor([7, 3, 1])
    source[torch.arange(9) >= source_lengths.unsqueeze(1)] = 0
    target[torch.arange(7) >= target_lengths.unsqueeze(1)] = 0
    return {
        "source": source,
        "target": target,
        "source_lengths": source_lengths,
        "target_lengths": target_lengths,
    }
