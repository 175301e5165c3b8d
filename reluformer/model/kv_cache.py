"""Keys and values kept between decoding steps, once for all hypotheses of a sentence."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from reluformer.model.records import KeyValues
from reluformer.ops.growing_buffer import append_slots

# Slots by which a tree grows before those that no hypothesis descends from any more are dropped.
_GROWTH = 128


@dataclass
class GrowingCache:
    """Keys and values of the tokens decoded so far, [B, Hkv, slots, D], in buffers that double.

    `start` is the position of the tokens that come next, and `visible` which slots they see, their
    own included: bool [B, 1, beams * t, slots], or None for the causal rule.
    """

    keys: Tensor | None = None
    values: Tensor | None = None
    slots: int = 0
    start: int = 0
    visible: Tensor | None = None

    def append(self, new: KeyValues) -> KeyValues:
        """Store the new tokens' keys and values [B, Hkv, t, D]; return all so far."""
        end = self.slots + new.keys.shape[2]
        self.keys = append_slots(self.keys, self.slots, new.keys)
        self.values = append_slots(self.values, self.slots, new.values)
        self.slots = end
        return KeyValues(self.keys[:, :, :end], self.values[:, :, :end])

    def select(self, sentences: Tensor) -> None:
        """Keep (and reorder, repeat) the given sentences."""
        if self.keys is not None and self.values is not None:
            self.keys = self.keys[:, :, : self.slots].index_select(0, sentences)
            self.values = self.values[:, :, : self.slots].index_select(0, sentences)

    def keep(self, slots: Tensor) -> None:
        """Keep the given slots [B, n] of each sentence."""
        if self.keys is not None and self.values is not None:
            _, heads, _, width = self.keys.shape
            index = slots[:, None, :, None].expand(-1, heads, -1, width)
            self.keys, self.values = self.keys.gather(2, index), self.values.gather(2, index)
            self.slots = slots.shape[1]


@dataclass
class DecoderState:
    """What decoding remembers of the target so far, and of the source.

    Both are stored once for each sentence, B of them, and its hypotheses (beams) are further query
    rows. A token of the target is a slot; `lineage` says which slots a hypothesis descends from. To
    go on from another hypothesis is to copy a row of that table, and what hypotheses have in common
    is stored and read once.
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
        """Make room for the next tokens [B * beams, t], and tell the caches what these see."""
        rows, t = tokens.shape
        sentences = self.source[0].keys.shape[0] if self.source else rows
        visible = self._see(sentences, rows // max(sentences, 1), t, tokens.device)
        for cache in self.layers:
            cache.start, cache.visible = self.length, visible
        self.length += t

    def select_rows(self, rows: Tensor) -> None:
        """Reorder the hypotheses; each must stay with its sentence."""
        if self.lineage is None:
            for cache in self.layers:
                cache.select(rows)
            return
        sentences, _, slots = self.lineage.shape
        self.lineage = self.lineage.flatten(0, 1)[rows].view(sentences, -1, slots)
        if slots >= self._compact_at:
            self._compact(self.lineage)

    def select_sentences(self, sentences: Tensor, beams: int) -> None:
        """Keep only the given sentences, with all their beams."""
        for cache in self.layers:
            cache.select(sentences)
        if self.lineage is not None:
            self.lineage = self.lineage[sentences]
        self.source = [KeyValues(*(t.index_select(0, sentences) for t in kv)) for kv in self.source]
        if self.source_lengths is not None:
            self.source_lengths = self.source_lengths.index_select(0, sentences)

    def _see(self, sentences: int, beams: int, t: int, device: torch.device) -> Tensor | None:
        if self.lineage is None:
            if beams == 1:
                return None
            slots = self.layers[0].slots
            self.lineage = torch.ones(sentences, beams, slots, dtype=torch.bool, device=device)
        # Slots of a step come hypothesis by hypothesis; each descends from its own t.
        own = torch.eye(beams, dtype=torch.bool, device=device).repeat_interleave(t, dim=1)
        self.lineage = torch.cat([self.lineage, own.expand(sentences, -1, -1)], dim=2)
        visible = self.lineage
        if t > 1:
            visible = visible.repeat_interleave(t, dim=1)
            earlier = torch.ones(t, t, dtype=torch.bool, device=device).tril().repeat(beams, beams)
            visible &= functional.pad(earlier, (visible.shape[2] - beams * t, 0), value=True)
        return visible.unsqueeze(1)

    def _compact(self, lineage: Tensor) -> None:
        """Drop slots without descendants, as many as every sentence can spare."""
        alive = lineage.any(dim=1)
        most = int(alive.sum(dim=1).max())
        # The living in their order, after as many dead as a sentence needs to reach `most`.
        slots = alive.byte().argsort(dim=1, stable=True)[:, -most:]
        self.lineage = lineage.gather(2, slots.unsqueeze(1).expand(-1, lineage.shape[1], -1))
        for cache in self.layers:
            cache.keep(slots)
        self._compact_at = most + _GROWTH
