"""KV caches: keys and values kept between decoding steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from reluformer.model.checks import check_beams
from reluformer.model.positions import Start
from reluformer.model.records import KeyValues
from reluformer.ops import PagedCache, decode_attention
from reluformer.ops.growing_buffer import append_slots
from reluformer.ops.rule import Rectified

# Number of new slots after which slots without descendants are dropped.
_GROWTH = 128


@dataclass
class GrowingCache:
    """Keys and values of the tokens decoded so far, [B, Hkv, slots, D], in buffers that double."""

    keys: Tensor | None = None
    values: Tensor | None = None
    slots: int = 0
    """Number of slots in use."""
    start: int = 0
    """Position of the next tokens."""
    visible: Tensor | None = None
    """Slots that the next tokens see, their own included: bool [B, 1, beams * t, slots]; None for
    the causal rule."""

    def append(self, new: KeyValues) -> KeyValues:
        """Store keys and values [B, Hkv, t, D] of new tokens; return those of all tokens."""
        end = self.slots + new.keys.shape[2]
        self.keys = append_slots(self.keys, self.slots, new.keys)
        self.values = append_slots(self.values, self.slots, new.values)
        self.slots = end
        return KeyValues(self.keys[:, :, :end], self.values[:, :, :end])

    def select(self, sentences: Tensor) -> None:
        """Keep the sentences with the given indices, in the given order."""
        if self.keys is not None and self.values is not None:
            self.keys = self.keys[:, :, : self.slots].index_select(0, sentences)
            self.values = self.values[:, :, : self.slots].index_select(0, sentences)

    def keep(self, slots: Tensor) -> None:
        """Keep the slots with the given indices [B, n] of each sentence."""
        if self.keys is not None and self.values is not None:
            _, heads, _, width = self.keys.shape
            index = slots[:, None, :, None].expand(-1, heads, -1, width)
            self.keys, self.values = self.keys.gather(2, index), self.values.gather(2, index)
            self.slots = slots.shape[1]


class PagedLayerCache:
    """Paged KV cache of one attention layer, for sequences of different lengths.

    The first `append` holds the prompts, padded at the end; each later one a token per sequence.

    Args:
        capacities: Maximum number of tokens of each sequence.
        page_size: Number of tokens of a page.
    """

    def __init__(self, capacities: Sequence[int], page_size: int) -> None:
        self.capacities, self.page_size = capacities, page_size
        self.start: Start = 0
        """Position of the next tokens: 0 for prompts, then [B, 1]."""
        self.counts: Sequence[int] = ()
        """Number of the next tokens that each sequence stores."""
        self._pages: PagedCache | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the prompts are still to come."""
        return self._pages is None

    def append(self, new: KeyValues) -> None:
        """Store the first `counts` of the new keys and values [B, Hkv, t, D]."""
        if self._pages is None:
            batch, kv_heads, _, width = new.keys.shape
            self._pages = PagedCache(
                batch,
                kv_heads,
                width,
                pages=sum(math.ceil(tokens / self.page_size) for tokens in self.capacities),
                page_size=self.page_size,
                max_length=max(self.capacities),
                dtype=new.keys.dtype,
                device=new.keys.device,
            )
        self._pages.append(new.keys, new.values, self.counts)

    def attend(self, q: Tensor, rule: Rectified, scale: float) -> Tensor:
        """Attention [B, H, 1, D] of the newest token q [B, H, 1, D] to its sequence."""
        assert self._pages is not None
        return decode_attention(
            q,
            self._pages,
            gamma=rule.gamma,
            length_exponent=rule.length_exponent,
            power=rule.power,
            threshold=rule.threshold,
            row_normalise=rule.row_normalise,
            scale=scale,
        )


LayerCache: TypeAlias = GrowingCache | PagedLayerCache
"""KV cache of one attention layer."""


@dataclass
class DecoderState:
    """KV caches of a decoder, for the target so far and for the source.

    Both are stored once for each of B sentences. The hypotheses (beams) of a sentence are further
    query rows. A target token is a slot, and `lineage` says which slots belong to a hypothesis.
    Continuing from another hypothesis copies a row of that table; a common prefix is stored once.
    """

    layers: list[GrowingCache]
    source: list[KeyValues] = field(default_factory=list)
    source_lengths: Tensor | None = None
    length: int = 0
    """Number of tokens decoded so far."""
    lineage: Tensor | None = None
    """Bool [B, beams, slots]; None while each sentence has one hypothesis."""
    _compact_at: int = _GROWTH

    def grow(self, tokens: Tensor) -> None:
        """Prepare the caches for the next tokens [B * beams, t]: positions and visible slots."""
        rows, t = tokens.shape
        sentences = self.source[0].keys.shape[0] if self.source else rows
        check_beams(rows, sentences)
        visible = self._visible(sentences, rows // max(sentences, 1), t, tokens.device)
        for cache in self.layers:
            cache.start, cache.visible = self.length, visible
        self.length += t

    def select_rows(self, rows: Tensor) -> None:
        """Reorder the hypotheses within their sentences by the given row indices."""
        if self.lineage is None:
            for cache in self.layers:
                cache.select(rows)
            return
        sentences, _, slots = self.lineage.shape
        self.lineage = self.lineage.flatten(0, 1)[rows].view(sentences, -1, slots)
        if slots >= self._compact_at:
            self._compact(self.lineage)

    def select_sentences(self, sentences: Tensor) -> None:
        """Keep the sentences with the given indices, with all their beams."""
        for cache in self.layers:
            cache.select(sentences)
        if self.lineage is not None:
            self.lineage = self.lineage[sentences]
        self.source = [KeyValues(*(t.index_select(0, sentences) for t in kv)) for kv in self.source]
        if self.source_lengths is not None:
            self.source_lengths = self.source_lengths.index_select(0, sentences)

    def _visible(self, sentences: int, beams: int, t: int, device: torch.device) -> Tensor | None:
        """Extend `lineage` by t new tokens; slots that they see, [B, 1, beams * t, slots]."""
        if self.lineage is None:
            if beams == 1:
                return None
            slots = self.layers[0].slots
            self.lineage = torch.ones(sentences, beams, slots, dtype=torch.bool, device=device)
        # The new slots are ordered by hypothesis, t for each.
        own = torch.eye(beams, dtype=torch.bool, device=device).repeat_interleave(t, dim=1)
        self.lineage = torch.cat([self.lineage, own.expand(sentences, -1, -1)], dim=2)
        visible = self.lineage
        if t > 1:
            visible = visible.repeat_interleave(t, dim=1)
            earlier = torch.ones(t, t, dtype=torch.bool, device=device).tril().repeat(beams, beams)
            visible &= functional.pad(earlier, (visible.shape[2] - beams * t, 0), value=True)
        return visible.unsqueeze(1)

    def _compact(self, lineage: Tensor) -> None:
        """Drop slots without descendants, the same number in every sentence."""
        alive = lineage.any(dim=1)
        most = int(alive.sum(dim=1).max())
        # Slots with descendants in their order, after as many others as are missing to `most`.
        slots = alive.byte().argsort(dim=1, stable=True)[:, -most:]
        self.lineage = lineage.gather(2, slots.unsqueeze(1).expand(-1, lineage.shape[1], -1))
        for cache in self.layers:
            cache.keep(slots)
        self._compact_at = most + _GROWTH
