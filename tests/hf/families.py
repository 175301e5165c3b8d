"""Tiny models of eight families, with random weights, for the tests of `reluformer.hf`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

import reluformer.hf  # noqa: F401  # registers the attentions

VOCABULARY = 40
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48}
DECODER = {**SMALL, **TOKENS, "num_hidden_layers": 2, "num_attention_heads": 4}
SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 1,
    **TOKENS,
}


class Family(NamedTuple):
    """One family: how to build a model, and its kind."""

    auto: Any
    config: Callable[[], Any]
    kind: str
    """`decoder`, `seq2seq`, `encoder` or `image`."""


FAMILIES = {
    "marian": Family(
        transformers.AutoModelForSeq2SeqLM,
        lambda: transformers.MarianConfig(**SEQ2SEQ, forced_eos_token_id=None),
        "seq2seq",
    ),
    "bart": Family(
        transformers.AutoModelForSeq2SeqLM,
        lambda: transformers.BartConfig(**SEQ2SEQ, forced_eos_token_id=None),
        "seq2seq",
    ),
    "t5": Family(
        transformers.AutoModelForSeq2SeqLM,
        lambda: transformers.T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=1,
            dropout_rate=0.0,
            **TOKENS,
        ),
        "seq2seq",
    ),
    "bert": Family(
        transformers.AutoModelForMaskedLM,
        lambda: transformers.BertConfig(**DECODER, hidden_dropout_prob=0.0),
        "encoder",
    ),
    "vit": Family(
        transformers.AutoModelForImageClassification,
        lambda: transformers.ViTConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=12,
            patch_size=4,
        ),
        "image",
    ),
    "gpt2": Family(
        transformers.AutoModelForCausalLM,
        lambda: transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, **TOKENS
        ),
        "decoder",
    ),
    "llama": Family(
        transformers.AutoModelForCausalLM,
        lambda: transformers.LlamaConfig(**DECODER, num_key_value_heads=2),
        "decoder",
    ),
    "qwen2": Family(
        transformers.AutoModelForCausalLM,
        lambda: transformers.Qwen2Config(
            **DECODER,
            num_key_value_heads=2,
            use_sliding_window=True,
            sliding_window=5,
            layer_types=["full_attention", "sliding_attention"],
        ),
        "decoder",
    ),
}
GENERATING = [name for name, family in FAMILIES.items() if family.kind in ("decoder", "seq2seq")]
DECODERS = [name for name, family in FAMILIES.items() if family.kind == "decoder"]


def build(name: str, attention: str, **options: Any) -> Any:
    """A model in evaluation mode; the same weights for every attention without learned options."""
    family = FAMILIES[name]
    torch.manual_seed(0)
    config = family.config()
    if options:
        config.attention_options = options
    model = family.auto.from_config(config, attn_implementation=attention)
    # Larger scores than at the usual initialisation, so that attentions differ.
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for key, parameter in sorted(model.named_parameters()):
            # Marian computes its positions anew when it is loaded.
            if parameter.dim() > 1 and not {"reluformer", "embed_positions"} & set(key.split(".")):
                parameter += 0.15 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    """Random token ids [B, T], none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def padding(left: bool) -> Tensor:
    """Padding mask [2, 7]: the second sequence has two positions of padding."""
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, slice(0, 2) if left else slice(5, 7)] = 0
    return mask


def inputs(name: str, left: bool = False) -> dict[str, Tensor]:
    """Arguments of a forward pass with padding, where the family has padding."""
    kind = FAMILIES[name].kind
    if kind == "image":
        return {"pixel_values": torch.randn(2, 3, 12, 12, generator=torch.Generator())}
    mask = padding(left)
    arguments = {"input_ids": tokens(2, 7), "attention_mask": mask}
    if kind == "seq2seq":
        arguments["decoder_input_ids"] = tokens(2, 6, seed=1)
    elif kind == "decoder":
        arguments["position_ids"] = (mask.cumsum(dim=-1) - 1).clamp_min(0)
    return arguments


def valid_logits(name: str, logits: Tensor, left: bool = False) -> Tensor:
    """Logits of tokens that are not padding, [N, vocabulary]."""
    if FAMILIES[name].kind in ("seq2seq", "image"):
        return logits
    return logits[padding(left).bool()]
