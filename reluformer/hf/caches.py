"""KV caches of transformers as caches of our decoder layers."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reluformer.model.blocks import DecoderLayer
from reluformer.model.kv_cache import GrowingCache
from reluformer.model.records import KeyValues


@dataclass
class AdaptedCache(GrowingCache):
    """Keys and values of one layer in a cache of transformers."""

    cache: Any = None
    """`transformers.Cache`."""
    layer: int = 0
    length: int = 0
    """Number of tokens before the next ones."""

    def append(self, new: KeyValues) -> KeyValues:
        """Store keys and values [B, Hkv, t, D] of new tokens; return those of all tokens."""
        keys, values = self.cache.update(new.keys, new.values, self.layer)
        # A static cache returns unused slots behind the last token.
        end = self.length + new.keys.shape[2]
        return KeyValues(keys[:, :, :end], values[:, :, :end])


def cached_length(past: Any) -> int:
    """Number of tokens in a cache of transformers, 0 for None."""
    return 0 if past is None else int(past.get_seq_length())


def self_cache(past: Any) -> Any:
    """The cache of the self-attentions in a cache of transformers."""
    return getattr(past, "self_attention_cache", past)


def source_keys(layer: DecoderLayer, index: int, hidden: Tensor, past: Any) -> KeyValues:
    """Keys and values of the source for the cross-attention of a layer, computed once.

    Args:
        layer: The layer.
        index: Its number.
        hidden: Output of the encoder, [B, S, width].
        past: `transformers.EncoderDecoderCache`, or None.
    """
    if past is None:
        return layer.project_source(hidden)
    if past.is_updated.get(index):
        stored = past.cross_attention_cache.layers[index]
        return KeyValues(stored.keys, stored.values)
    new = layer.project_source(hidden)
    keys, values = past.cross_attention_cache.update(new.keys, new.values, index)
    past.is_updated[index] = True
    return KeyValues(keys[:, :, : hidden.shape[1]], values[:, :, : hidden.shape[1]])


def visible_keys(mask: Tensor, rows: int) -> Tensor:
    """Bool [B, 1, rows, T]: keys that the last rows see under a padding mask [B, T]."""
    keys = torch.arange(mask.shape[1], device=mask.device)
    return (keys <= keys[-rows:].unsqueeze(-1)) & mask.bool()[:, None, None, :]
