"""What the layers of a model hand to each other and report about themselves."""

from typing import Literal, NamedTuple

from torch import Tensor

from reluformer.ops import RowSums, Stats

Record = Literal["nothing", "row_sum", "entropy", "stats", "weights"]
"""How much a forward pass reports, each more than the one before: nothing; row sums, or those and
entropies, of the attentions that the regularisers are for; row statistics of all attentions; those
and whole maps. Fused kernels make no more than sums and entropies."""


class KeyValues(NamedTuple):
    """Keys [B, Hkv, Tk, D] and values [B, Hkv, Tk, D] of one attention."""

    keys: Tensor
    values: Tensor


class AttentionRecord(NamedTuple):
    """What one attention reports about one forward pass."""

    site: str
    """`encoder`, `decoder` or `cross`."""
    layer: int
    stats: Stats | RowSums
    """As much as was asked for, each field [B, H, rows]; `rows` are all query rows or a random
    sample of them."""
    valid: Tensor
    """Bool, broadcastable to [B, H, rows]: False where the query is padding."""
    weights: Tensor | None
    """[B, H, Tq, Tk] when whole maps were asked for."""


class Output(NamedTuple):
    """Logits [B, T, vocabulary], and a record for each attention if they were asked for."""

    logits: Tensor
    records: tuple[AttentionRecord, ...]
