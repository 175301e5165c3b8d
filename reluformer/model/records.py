"""Data that the layers of a model pass on and report."""

from typing import Literal, NamedTuple

from torch import Tensor

from reluformer.context_parallel import ShardedSequence
from reluformer.ops import RowSums, Stats

Record = Literal["nothing", "row_sum", "entropy", "stats", "weights"]
"""How much a forward pass reports; each level includes the one before.

- `nothing`
- `row_sum`: row sums of the attentions that have regularisers
- `entropy`: row sums and entropies of these attentions
- `stats`: row statistics of all attentions
- `weights`: row statistics and attention maps of all attentions

Fused kernels compute row sums and entropies; the last two levels need the reference.
"""


class ForwardOptions(NamedTuple):
    """Options of a forward pass, the same for every layer."""

    query_lengths: Tensor | None = None
    """Number of query tokens that are not padding, [B]."""
    record: Record = "nothing"
    sample_rows: int | None = None
    """Record a random sample of this many query rows; None records all."""
    entropy_every: int = 1
    """Record the entropy of one block of query rows in this many."""
    sequence: ShardedSequence | None = None
    """Sequence whose tokens are distributed over ranks; the pass holds this rank's shard."""


DEFAULT_OPTIONS = ForwardOptions()
"""A forward pass without padding that records nothing."""


class KeyValues(NamedTuple):
    """Projected keys and values of one attention."""

    keys: Tensor
    """[B, Hkv, Tk, D]."""
    values: Tensor
    """[B, Hkv, Tk, D]."""


class AttentionRecord(NamedTuple):
    """Report of one attention about one forward pass."""

    site: str
    """`encoder`, `decoder` or `cross`."""
    layer: int
    stats: Stats | RowSums
    """Fields [B, H, rows], as far as recorded; rows are all query rows or a random sample."""
    valid: Tensor
    """Bool, broadcastable to [B, H, rows]: False where the query is padding."""
    weights: Tensor | None
    """Attention map [B, H, Tq, Tk], if recorded."""


class Output(NamedTuple):
    """Result of a forward pass of a model."""

    logits: Tensor
    """[B, T, vocabulary]."""
    records: tuple[AttentionRecord, ...]
    """One record for each attention, if recorded."""
    expert_choices: tuple[Tensor, ...] = ()
    """For each layer, `KeyValueMemory.expert_choices` [B, experts]; empty without experts or in
    evaluation mode."""
