"""Keys and values kept between decoding steps."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from reluformer.model.readings import KeyValues


@dataclass
class GrowingCache:
    """Keys and values of the tokens decoded so far, [rows, Hkv, T, D], in buffers that double."""

    keys: Tensor | None = None
    values: Tensor | None = None
    length: int = 0

    def append(self, new: KeyValues) -> KeyValues:
        """Store the new tokens' keys and values [rows, Hkv, t, D]; return all so far."""
        end = self.length + new.keys.shape[2]
        self.keys = _with_room(self.keys, new.keys, self.length, end)
        self.values = _with_room(self.values, new.values, self.length, end)
        self.keys[:, :, self.length : end] = new.keys
        self.values[:, :, self.length : end] = new.values
        self.length = end
        return KeyValues(self.keys[:, :, :end], self.values[:, :, :end])

    def select(self, rows: Tensor) -> None:
        """Keep (and reorder, repeat) the given rows."""
        if self.keys is not None and self.values is not None:
            self.keys = self.keys[:, :, : self.length].index_select(0, rows)
            self.values = self.values[:, :, : self.length].index_select(0, rows)


@dataclass
class DecoderState:
    """What decoding remembers: a growing cache for each layer, and the source's keys and values.

    The source is stored once for each sentence: the beams of a sentence read it as further query
    rows, so `rows` of the growing caches are sentences times beams, sentence by sentence.
    """

    layers: list[GrowingCache]
    source: list[KeyValues] = field(default_factory=list)
    source_lengths: Tensor | None = None

    @property
    def length(self) -> int:
        """Number of tokens decoded so far."""
        return self.layers[0].length

    def select_rows(self, rows: Tensor) -> None:
        """Reorder the hypotheses; each must stay with its sentence."""
        for cache in self.layers:
            cache.select(rows)

    def select_sentences(self, sentences: Tensor, beams: int) -> None:
        """Keep only the given sentences, with all their beams."""
        offsets = torch.arange(beams, device=sentences.device)
        self.select_rows((sentences.unsqueeze(-1) * beams + offsets).flatten())
        self.source = [KeyValues(*(t.index_select(0, sentences) for t in kv)) for kv in self.source]
        if self.source_lengths is not None:
            self.source_lengths = self.source_lengths.index_select(0, sentences)


def _with_room(buffer: Tensor | None, new: Tensor, length: int, end: int) -> Tensor:
    if buffer is not None and buffer.shape[2] >= end:
        return buffer
    rows, heads, _, width = new.shape
    grown = new.new_zeros(rows, heads, max(2 * length, end, 16), width)
    if buffer is not None:
        grown[:, :, :length] = buffer[:, :, :length]
    return grown
