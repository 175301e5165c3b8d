"""Conversion of a softmax ReLUFormer to CTranslate2's format.

The layouts match: pre-norm or post-norm layers, ReLU memories, tied embeddings, sinusoidal
positions. Trained softmax models can be converted too.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from reluformer.errors import UserError
from reluformer.model import ReLUFormer
from reluformer.model.positions import sinusoids

MAX_POSITIONS = 4096
SPECIALS = ["<pad>", "<s>", "</s>"]
NEVER_DECODED = [["<pad>"], ["<s>"]]
"""Sequences that CTranslate2 must suppress, as the searches of this package do."""


def to_text(sources: Sequence[Sequence[int]]) -> list[list[str]]:
    """Ids as the tokens of a converted model."""
    return [[f"t{token}" for token in source] for source in sources]


def to_ids(tokens: Sequence[str]) -> list[int]:
    """Ids of the tokens of a converted model."""
    return [int(token[1:]) for token in tokens]


def convert(model: ReLUFormer, folder: Path, quantization: str | None) -> None:
    """Write a model for CTranslate2.

    Args:
        model: A model with softmax attention, ReLU memories without bias, sinusoidal positions and
            tied embeddings.
        folder: Folder to write.
        quantization: As in CTranslate2: None or `int8`.
    """
    from ctranslate2.specs import TransformerSpec

    config = model.config
    kinds = {config.attention_at(site).kind for site in ("encoder", "decoder", "cross")}
    if kinds != {"softmax"} or config.memory != "relu" or not config.tie_embeddings:
        raise UserError("CTranslate2 needs softmax attention, ReLU memories, tied embeddings")
    layers = (config.encoder_layers, config.decoder_layers)
    spec = TransformerSpec.from_config(layers, config.heads, pre_norm=config.norm == "pre")
    for stack, to in ((model.encoder, spec.encoder), (model.decoder, spec.decoder)):
        embeddings = to.embeddings[0] if isinstance(to.embeddings, list) else to.embeddings
        embeddings.weight = _array(model.target_embedding.weight)
        table = sinusoids(MAX_POSITIONS, config.width, 0, model.target_embedding.weight)
        to.position_encodings.encodings = _array(table)
        for layer, layer_to in zip(stack, to.layer, strict=True):
            _layer(layer, layer_to)
    if config.norm == "pre":
        _norm(model.encoder_norm, spec.encoder.layer_norm)
        _norm(model.decoder_norm, spec.decoder.layer_norm)
    spec.decoder.projection.weight = _array(model.target_embedding.weight)
    vocabulary = [*SPECIALS, *(f"t{i}" for i in range(len(SPECIALS), config.vocabulary))]
    spec.register_source_vocabulary(vocabulary)
    spec.register_target_vocabulary(vocabulary)
    spec.config.unk_token, spec.config.bos_token, spec.config.eos_token = vocabulary[:3]
    spec.config.decoder_start_token, spec.config.add_source_eos = "<s>", True
    spec.validate()
    spec.optimize(quantization=quantization)
    folder.mkdir(parents=True, exist_ok=True)
    spec.save(str(folder))


def _layer(layer: Any, to: Any) -> None:
    """Weights of an encoder or decoder layer."""
    own = layer.self_attention.attention
    _linear(to.self_attention.linear[0], own.query, own.key_value)
    _linear(to.self_attention.linear[1], own.out)
    _norm(layer.self_attention.residual.norm, to.self_attention.layer_norm)
    if getattr(layer, "cross_attention", None) is not None:
        cross = layer.cross_attention.attention
        for linear, part in zip(
            to.attention.linear, (cross.query, cross.key_value, cross.out), strict=True
        ):
            _linear(linear, part)
        _norm(layer.cross_attention.residual.norm, to.attention.layer_norm)
    memory = layer.memory.memory
    slots, width = memory.keys.shape
    to.ffn.linear_0.weight, to.ffn.linear_0.bias = _array(memory.keys), _array(torch.zeros(slots))
    to.ffn.linear_1.weight = _array(memory.values.t())
    to.ffn.linear_1.bias = _array(torch.zeros(width))
    _norm(layer.memory.residual.norm, to.ffn.layer_norm)


def _linear(to: Any, *parts: nn.Linear) -> None:
    """One linear layer from the rows of several."""
    to.weight = _array(torch.cat([part.weight for part in parts]))
    to.bias = _array(torch.cat([part.bias for part in parts]))


def _norm(norm: Any, to: Any) -> None:
    to.gamma, to.beta = _array(norm.weight), _array(norm.bias)


def _array(tensor: Tensor) -> Any:
    return tensor.detach().float().contiguous().numpy().copy()
