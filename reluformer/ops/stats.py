"""Statistics of the weights of each query row."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from reluformer.ops.memory import hide

ENTROPY_BLOCK = 256
"""Number of query rows whose entropies are computed or left out together: a power of two, not
smaller than the tile of any kernel."""

SumsLevel = Literal["row_sum", "entropy"]
"""Requested row sums: sum(w), or sum(w) and the entropy."""


class RowSums(NamedTuple):
    """Statistics of each query row that need no map of weights; every field is [B, H, Tq].

    The fields are those of `Stats`. For packed sequences every field is [N, H].
    """

    row_sum: Tensor
    """sum_j |w_ij|, differentiable."""
    entropy: Tensor | None
    """Entropy of the row-normalised weights, in nats, differentiable; None if not requested. The
    constant 0 in rows that are not sampled."""
    visible: Tensor
    """n, the number of keys the row can see."""
    sampled: Tensor | None = None
    """Bool: the rows whose entropies were computed; None if all were."""


class Stats(NamedTuple):
    """Statistics of the weights of each query row; every field is [B, H, Tq].

    For signed weights the sums and entropies are those of the absolute weights.
    """

    row_sum: Tensor
    """sum_j |w_ij| before row normalisation, differentiable, so that a loss can keep rows alive."""
    entropy: Tensor
    """Entropy of the row-normalised weights, in nats, differentiable; 0 in a row without weight."""
    raw_entropy: Tensor
    """-sum_j |w_ij| ln |w_ij|, differentiable."""
    zeros: Tensor
    """Share of the visible keys whose weight is exactly zero; 0 in a row that sees nothing."""
    max: Tensor
    """Largest weight, differentiable; 0 in a row that sees nothing."""
    visible: Tensor
    """n, the number of keys the row can see."""


def summarise(weights: Tensor, visible: Tensor | None, unnormalised: Tensor | None = None) -> Stats:
    """Statistics of weights [B, H, Tq, Tk] under a visibility table broadcastable to them.

    `unnormalised` are the weights before row normalisation; None if the rule has none.
    """
    if visible is None:
        visible = torch.ones_like(weights, dtype=torch.bool)
    visible = visible.expand_as(weights)
    size = weights.abs()
    row_sum = size.sum(dim=-1)
    log_sum = sum_of_w_log_w(size)
    n = visible.sum(dim=-1, dtype=weights.dtype)
    zeros = (visible & (weights == 0)).sum(dim=-1, dtype=weights.dtype) / n.clamp_min(1)
    # Without any key there is no largest weight; the row sum is 0 there, with the right shape.
    largest = hide(weights, visible, -torch.inf).amax(dim=-1) if weights.shape[-1] else row_sum
    return Stats(
        row_sum=row_sum if unnormalised is None else unnormalised.abs().sum(dim=-1),
        entropy=entropy_from_sums(row_sum, log_sum),
        raw_entropy=-log_sum,
        zeros=zeros,
        max=largest.masked_fill(n == 0, 0.0),
        visible=n,
    )


def sampled_rows(batch: int, heads: int, rows: int, every: int, device: torch.device) -> Tensor:
    """Rows whose entropies are computed, one block of `ENTROPY_BLOCK` in `every`: bool [B, H, Tq].

    Block i of head h in batch element b is sampled if i + h + b is a multiple of `every`. The
    blocks differ between heads and between batch elements, so that all positions take part and
    sequences of a single block are sampled in one of `every` heads.
    """
    sizes = (-(-rows // ENTROPY_BLOCK), heads, batch)
    block, head, element = (torch.arange(size, device=device) for size in sizes)
    blocks = (element[:, None, None] + head[:, None] + block) % every == 0
    return blocks.repeat_interleave(ENTROPY_BLOCK, dim=-1)[..., :rows]


def row_sums(
    row_sum: Tensor, log_sum: Tensor | None, n: Tensor | int, entropy_every: int = 1
) -> RowSums:
    """`RowSums` from sum(w) and, if entropies are requested, sum(w ln w), both [B, H, Tq].

    n, the number of visible keys, is broadcastable to them. With `entropy_every` above 1, only the
    entropies of `sampled_rows` are kept.
    """
    if isinstance(n, int):
        visible = torch.full_like(row_sum, n)
    else:
        visible = n.to(row_sum.dtype).expand(row_sum.shape)
    if log_sum is None:
        return RowSums(row_sum, None, visible)
    entropy = entropy_from_sums(row_sum, log_sum)
    if entropy_every == 1:
        return RowSums(row_sum, entropy, visible)
    batch, heads, rows = row_sum.shape
    sampled = sampled_rows(batch, heads, rows, entropy_every, row_sum.device)
    return RowSums(row_sum, torch.where(sampled, entropy, 0.0), visible, sampled)


def sum_of_w_log_w(weights: Tensor) -> Tensor:
    """sum_j w ln w over the last dimension, with 0 ln 0 = 0 in value and in gradient."""
    live = weights > 0
    # The inner `where` keeps ln 0 out of the graph: its infinite slope times zero would be NaN.
    logs = torch.where(live, weights, 1.0).log()
    return (weights * logs).sum(dim=-1)


def has_weight(row_sum: Tensor) -> Tensor:
    """Bool of the shape of `row_sum`: rows whose sum is so far above 0 that 1 / sum is finite.

    A sum that underflows almost to 0 is common at power 8, where a single visible key with a score
    just above the threshold has a weight of 1e-40.
    """
    return row_sum > 1e6 * torch.finfo(row_sum.dtype).tiny


def entropy_from_sums(row_sum: Tensor, log_sum: Tensor) -> Tensor:
    """Entropy of w / sum(w) from sum(w) and sum(w ln w): ln S - (sum w ln w) / S; 0 where S = 0.

    A row of underflowing weights counts as a row without weight, because 1/S would overflow.
    """
    live = has_weight(row_sum)
    total = torch.where(live, row_sum, 1.0)
    return torch.where(live, total.log() - log_sum / total, 0.0)
