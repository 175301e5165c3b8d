"""What training minimises: smoothed cross-entropy and the two regularisers of ReLU attention."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from reluformer.model.readings import Reading
from reluformer.ops import RowSums

MARGIN = 0.7
"""C = 0.7 ln n caps the entropy of a row (Shen et al. 2023, Eq. 7 and appendix A)."""


class AttentionLosses(NamedTuple):
    """The regularisers, each summed over attentions of a mean over live rows and heads."""

    normalisation: Tensor
    """|ln row_sum|: pulls every row's total weight to 1."""
    entropy: Tensor
    """max(H - 0.7 ln n, 0), H the entropy of the row-normalised weights: keeps rows informative.
    The mean is over the rows whose entropies were computed; 0 where only row sums were recorded."""
    dead_rows: Tensor
    """Share of the rows that see a key but give none any weight; no loss can revive those."""


class AttentionSums(NamedTuple):
    """Sums over rows and heads for each of A attentions; every field is [A]."""

    normalisation: Tensor
    entropy: Tensor
    sampled: Tensor
    """Rows with any weight whose entropies were computed."""
    live: Tensor
    """Rows with any weight."""
    rows: Tensor
    """Rows that are no padding and see a key."""


def translation_loss(
    logits: Tensor, target: Tensor, *, pad_id: int, smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Sums over the real tokens of target [B, T]: smoothed cross-entropy, and plain (NLL).

    Divide both by the number of real tokens; sums add over accumulated batches and processes.
    """
    # Half precision would lose the tail of the vocabulary's sum.
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    flat, wanted = precise.flatten(0, 1), target.flatten()
    nll = functional.cross_entropy(flat, wanted, ignore_index=pad_id, reduction="sum")
    if smoothing == 0:
        return nll, nll.detach()
    smooth = functional.cross_entropy(
        flat, wanted, ignore_index=pad_id, reduction="sum", label_smoothing=smoothing
    )
    return smooth, nll.detach()


def attention_sums(readings: Sequence[Reading], margin: float = MARGIN) -> AttentionSums:
    """Sums and counts over the rows of each reading of a forward pass (at least one)."""
    parts = [_one_attention(reading, margin) for reading in readings]
    return AttentionSums(*(torch.stack(column) for column in zip(*parts, strict=True)))


def attention_losses(readings: Sequence[Reading], margin: float = MARGIN) -> AttentionLosses:
    """The regularisers over all readings of a forward pass (at least one)."""
    return mean_losses(attention_sums(readings, margin))


def mean_losses(sums: AttentionSums, counts: AttentionSums | None = None) -> AttentionLosses:
    """Losses from sums, divided by the counts of `counts` where the rows are spread over processes.

    Divided by global counts, the losses of all processes add up to the loss of the whole batch.
    """
    counts = sums if counts is None else counts
    sampled, live, rows = (count.clamp_min(1) for count in counts[2:])
    return AttentionLosses(
        normalisation=(sums.normalisation / live).sum(),
        entropy=(sums.entropy / sampled).sum(),
        dead_rows=((sums.rows - sums.live) / rows).mean(),
    )


def _one_attention(reading: Reading, margin: float) -> tuple[Tensor, ...]:
    stats = reading.stats
    rows = reading.valid & (stats.visible > 0)
    live = rows & (stats.row_sum > 0)
    # Dead rows leave the mean: their logarithm is infinite and their gradient zero.
    distance = _distance_from_one(torch.where(live, stats.row_sum, 1.0))
    excess, sampled = torch.zeros_like(distance), live
    if stats.entropy is not None:
        if isinstance(stats, RowSums) and stats.sampled is not None:
            sampled = live & stats.sampled
        cap = margin * stats.visible.clamp_min(1).log()
        excess = torch.where(sampled, (stats.entropy - cap).clamp_min(0), 0.0)
    counts = (sampled, live, rows.expand_as(live))
    return distance.sum(), excess.sum(), *(each.sum() for each in counts)


def _distance_from_one(row_sum: Tensor) -> Tensor:
    """|ln row_sum|. Its slope, 1 / row_sum, is steep where a row has almost no weight."""
    return row_sum.log().abs()
