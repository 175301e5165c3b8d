"""Attention maps of translated texts."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from reluformer.data.batches import pad_sources
from reluformer.data.tokenizer import Tokenizer
from reluformer.diagnostics import attention_maps, evaluating
from reluformer.model import ReLUFormer
from reluformer.model.blocks import DecoderLayer
from reluformer.model.records import ForwardOptions


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


def compute_cross_maps(
    model: ReLUFormer, tokenizer: Tokenizer, pairs: Sequence[Sequence[Sequence[int]]]
) -> list[Tensor]:
    """Weights [layers, H, T, S] of the cross-attentions for each pair of a batch.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        pairs: Source and target ids without start and end, as in `compute_maps`.
    """
    device = model.target_embedding.weight.device
    source, source_lengths = pad_sources([source for source, _ in pairs])
    target, target_lengths = pad_sources([(tokenizer.bos, *target) for _, target in pairs])
    # Rows behind the last target token are not read: the end token is padding here.
    target, target_lengths = target[:, :-1], target_lengths - 1
    weights: list[Tensor] = []
    with evaluating(model):
        encoded = model.encode(source.to(device), source_lengths.to(device))
        options = ForwardOptions(target_lengths.to(device), record="weights")
        x = model.embed(target.to(device), model.target_embedding)
        for layer in cast("list[DecoderLayer]", model.decoder):
            output = layer(x, options, encoded.hidden, encoded.lengths)
            x, report = output.x, output.cross_attention
            assert report is not None and report.weights is not None
            weights.append(report.weights.cpu())
    lengths = zip(target_lengths.tolist(), source_lengths.tolist(), strict=True)
    maps = torch.stack(weights, dim=1)
    return [each[..., :rows, :columns] for each, (rows, columns) in zip(maps, lengths, strict=True)]


def _texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    special = {tokenizer.bos: "<bos>", tokenizer.eos: "<eos>", tokenizer.sep: "<sep>"}
    return [special.get(i) or tokenizer.decode([i]) for i in ids]


def _rounded(values: Any) -> Any:
    return [_rounded(value) for value in values] if isinstance(values, list) else round(values, 5)
