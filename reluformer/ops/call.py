"""One attention call: the arguments that every backend receives, and the results it returns."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from reluformer.ops.stats import RowSums, Stats, SumsLevel
from reluformer.ops.visibility import Visibility

_STATISTICS = {None: 0, "row_sum": 1, "entropy": 2}


class AttentionResult(NamedTuple):
    """Output of an attention and the requested extras; extras that were not requested are None."""

    output: Tensor
    """[B, H, Tq, Dv]."""
    weights: Tensor | None
    """[B, H, Tq, Tk], before dropout and before any output norm or gate."""
    stats: Stats | None
    """Statistics of the weights, each field [B, H, Tq]."""
    sums: RowSums | None = None
    """Row sums and, on request, entropies of the weights, each field [B, H, Tq]."""


class KernelResult(NamedTuple):
    """Results of a fused kernel, [B, H, Tq] for dense and [N, H] for packed calls."""

    output: Tensor
    """[B, H, Tq, Dv], or [N, H, Dv] for packed calls."""
    row_sum: Tensor | None
    """sum_j w_ij before row normalisation and dropout; None if the call does not request it."""
    log_sum: Tensor | None
    """sum_j w_ij ln w_ij; None if the call does not request it."""


Prepared = Callable[["Call", Mapping[str, Any]], KernelResult | None]
"""A remembered call of a kernel: runs calls of one signature, from the shared arguments and the
attention's options; None if the call has to be run by the backend."""


class Packing(NamedTuple):
    """Boundaries of sequences that are stored one after the other, without padding."""

    cu_q: Tensor
    """[B + 1] int32 or int64: sequence b holds query rows cu_q[b] to cu_q[b + 1]."""
    cu_k: Tensor
    """[B + 1]: sequence b holds keys cu_k[b] to cu_k[b + 1]."""
    max_q: int
    """Largest number of query rows of a sequence."""
    max_k: int
    """Largest number of keys of a sequence."""


class Call(NamedTuple):
    """The arguments that all attentions share.

    q [B, H, Tq, D], k [B, Hkv, Tk, D], v [B, Hkv, Tk, Dv], bias broadcastable to [B, H, Tq, Tk].
    With `packing`, q is [N, H, D], k [M, Hkv, D] and v [M, Hkv, Dv].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    visibility: Visibility
    scale: float
    bias: Tensor | None = None
    dropout_p: float = 0.0
    return_weights: bool = False
    return_stats: bool = False
    return_sums: SumsLevel | None = None
    entropy_every: int = 1
    """Entropies are computed for one block of query rows in N, see `stats.sampled_rows`."""
    packing: Packing | None = None

    @property
    def groups(self) -> int:
        """Number of query heads that share one key/value head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def statistics(self) -> int:
        """Row sums that a kernel computes: 0 none, 1 sum(w), 2 also sum(w ln w)."""
        return _STATISTICS[self.return_sums]
