"""Attention maps of one translated text, with its tokens."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reluformer.data.tokenizer import Tokenizer
from reluformer.diagnostics import attention_maps
from reluformer.model import ReLUFormer


class AttentionMaps(NamedTuple):
    """Weights of every attention for one source text and its translation."""

    source: list[str]
    """S tokens as text, the end token last."""
    target: list[str]
    """T tokens as text, the start token first; row t of a map predicts token t + 1."""
    encoder: Tensor
    """[layers, H, S, S]."""
    decoder: Tensor
    """[layers, H, T, T]."""
    cross: Tensor
    """[layers, H, T, S]."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, weights rounded to five decimals."""
        return {
            name: value if isinstance(value, list) else _rounded(value.tolist())
            for name, value in self._asdict().items()
        }


def compute_maps(
    model: ReLUFormer, tokenizer: Tokenizer, source: Sequence[int], target: Sequence[int]
) -> AttentionMaps:
    """Record the weights of all attentions for source and target ids without start and end.

    Persistent slots, which are no tokens, are left out.
    """
    device = model.target_embedding.weight.device
    source, target = [*source, tokenizer.eos], [tokenizer.bos, *target]
    batch = {"source": torch.tensor([source]), "target": torch.tensor([target])}
    maps = attention_maps(model, {name: ids.to(device) for name, ids in batch.items()})
    keys = {"encoder": len(source), "decoder": len(target), "cross": len(source)}
    sites = {
        site: torch.stack([w[0, ..., -count:].cpu() for (s, _), w in maps.items() if s == site])
        for site, count in keys.items()
    }
    return AttentionMaps(_texts(tokenizer, source), _texts(tokenizer, target), **sites)


def _texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    special = {tokenizer.bos: "<bos>", tokenizer.eos: "<eos>", tokenizer.sep: "<sep>"}
    return [special.get(i) or tokenizer.decode([i]) for i in ids]


def _rounded(values: Any) -> Any:
    return [_rounded(value) for value in values] if isinstance(values, list) else round(values, 5)
