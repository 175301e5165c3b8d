"""What training minimises: smoothed cross-entropy and the two regularisers of ReLU attention."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from reluformer.model.records import AttentionRecord
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


def attention_sums(records: Sequence[AttentionRecord], margin: float = MARGIN) -> AttentionSums:
    """Sums and counts over the rows of each record of a forward pass (at least one)."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for at, record in enumerate(records):
        stats = record.stats
        key = (stats.row_sum.shape, stats.entropy is None, _sampled(record) is None)
        alike.setdefault(key, []).append(at)
    parts: dict[int, tuple[Tensor, ...]] = {}
    for places in alike.values():
        # All attentions of a shape at once: rows are few, and on a GPU an operation takes longer
        # to start than to run.
        columns = _sums_over_rows([records[at] for at in places], margin)
        parts |= zip(
            places, zip(*(column.unbind() for column in columns), strict=True), strict=True
        )
    rows = (parts[at] for at in range(len(records)))
    return AttentionSums(*(torch.stack(column) for column in zip(*rows, strict=True)))


def attention_losses(records: Sequence[AttentionRecord], margin: float = MARGIN) -> AttentionLosses:
    """The regularisers over all records of a forward pass (at least one)."""
    return mean_losses(attention_sums(records, margin))


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


def _sampled(record: AttentionRecord) -> Tensor | None:
    return record.stats.sampled if isinstance(record.stats, RowSums) else None


def _sums_over_rows(records: Sequence[AttentionRecord], margin: float) -> tuple[Tensor, ...]:
    """The fields of `AttentionSums` of records of one shape."""
    row_sum = torch.stack([record.stats.row_sum for record in records])
    visible = _stacked([record.stats.visible for record in records], row_sum)
    valid = _stacked([record.valid for record in records], row_sum)
    rows = valid & (visible > 0)
    live = rows & (row_sum > 0)
    # Dead rows leave the mean: their logarithm is infinite and their gradient zero.
    distance = _distance_from_one(torch.where(live, row_sum, 1.0)).sum((1, 2, 3))
    counts = torch.stack([live, rows]).sum((2, 3, 4))
    entropies = [each for record in records if (each := record.stats.entropy) is not None]
    if not entropies:
        return distance, torch.zeros_like(distance), counts[0], *counts
    chosen = [each for record in records if (each := _sampled(record)) is not None]
    sampled = live & _stacked(chosen, row_sum) if chosen else live
    cap = margin * visible.clamp_min(1).log()
    excess = torch.where(sampled, (torch.stack(entropies) - cap).clamp_min(0), 0.0)
    return distance, excess.sum((1, 2, 3)), sampled.sum((1, 2, 3)), *counts


def _stacked(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """[A, B, H, T] of parts that are broadcast to the [B, H, T] of `like`."""
    return torch.stack([part.expand(like.shape[1:]) for part in parts])


def _distance_from_one(row_sum: Tensor) -> Tensor:
    """|ln row_sum|. Its slope, 1 / row_sum, is steep where a row has almost no weight."""
    return row_sum.log().abs()
