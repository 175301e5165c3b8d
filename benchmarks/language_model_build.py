"""The Llama-shaped model of `benchmarks.language_model`."""

from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig


class Size(NamedTuple):
    """Shape of the model and of a training step."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    inner: int = 2560
    vocabulary: int = 16_000
    length: int = 1024
    batch: int = 64
    steps: int = 1526
    """100 M tokens of 64 sequences of 1024."""


TINY = Size(2, 64, 2, 128, 16_000, 64, 4, 12)


def build(
    size: Size, attention: str, length: int | None = None, options: dict[str, Any] | None = None
) -> nn.Module:
    """The model with random weights; the attention is the only difference between two models."""
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=max(size.length, length or 0),
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **({"attention_options": options} if options else {}),
    )
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model


def compile_layers(model: nn.Module) -> None:
    """Compile the decoder layers; the mask is made outside of them, so causality stays a flag."""
    # Layers of one class share a graph, unless a number in them differs.
    torch._dynamo.config.recompile_limit = 64
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.compile()  # type: ignore[union-attr,operator]
