"""Reference searches: whole forward passes, without KV cache and batching."""

from itertools import product
from typing import Any

import torch

from reluformer.model import AttentionConfig, ModelConfig, ReLUFormer


def tiny_model(
    kind: str = "relu",
    vocabulary: int = 8,
    seed: int = 0,
    ending: float = 2.0,
    **settings: Any,
) -> ReLUFormer:
    """A random model with distinct logits; `ending` raises the logit of the end token."""
    torch.manual_seed(seed)
    defaults = {"width": 16, "heads": 2, "encoder_layers": 1, "decoder_layers": 2, "slots": 16}
    config = ModelConfig(
        vocabulary=vocabulary,
        attention=AttentionConfig(kind=kind, row_sum_init=None, threshold_init=0.0),
        **{**defaults, **settings},
    )
    model = ReLUFormer(config).eval()
    with torch.no_grad():
        model.decoder_norm.weight.mul_(2.0)
        model.decoder_norm.bias.add_(ending * model.target_embedding.weight[config.eos_id])
    return model


def log_probabilities(model: ReLUFormer, source: list[int], tokens: list[int]) -> torch.Tensor:
    """Log-probabilities of the next token after each prefix, [len(tokens) + 1, vocabulary]."""
    config = model.config
    with torch.no_grad():
        logits = model(
            torch.tensor([[*source, config.eos_id]]), torch.tensor([[config.bos_id, *tokens]])
        ).logits
    return logits[0].log_softmax(-1)


def log_probability(model: ReLUFormer, source: list[int], tokens: list[int]) -> float:
    """Log-probability of `tokens` followed by the end token."""
    table = log_probabilities(model, source, tokens)
    wanted = torch.tensor([*tokens, model.config.eos_id])
    return float(table.gather(1, wanted.unsqueeze(-1)).sum())


def exhaustive(
    model: ReLUFormer, source: list[int], shortest: int, longest: int, length_penalty: float
) -> list[tuple[float, list[int]]]:
    """All hypotheses with their scores, best first."""
    config = model.config
    special = {config.pad_id, config.bos_id, config.eos_id}
    words = [token for token in range(config.vocabulary) if token not in special]
    everything = [
        list(tokens)
        for length in range(shortest, longest + 1)
        for tokens in product(words, repeat=length)
    ]
    scored = [
        (log_probability(model, source, tokens) / (len(tokens) + 1) ** length_penalty, tokens)
        for tokens in everything
    ]
    return sorted(scored, key=lambda pair: -pair[0])
