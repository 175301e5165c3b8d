"""Training losses: smoothed cross-entropy, regularisers of ReLU attention, expert balance."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from reluformer.model.records import AttentionRecord
from reluformer.ops import RowSums
from reluformer.ops.stats import has_weight

MARGIN = 0.7
"""Factor of C = 0.7 ln n, the entropy above which a row is penalised (Shen et al. 2023, Eq. 7)."""

EXPERT_BALANCE_WEIGHT = 0.001
"""Weight of `expert_balance_loss` in the paper of sigma-MoE (Csordas et al. 2023)."""


class AttentionLosses(NamedTuple):
    """Regularisers: means over the live rows and heads of an attention, summed over attentions."""

    normalisation: Tensor
    """|ln row_sum|, which pulls the row sum towards 1."""
    entropy: Tensor
    """max(H - 0.7 ln n, 0), with H the entropy of the row-normalised weights.

    The mean is over rows whose entropy was recorded; 0 if only row sums were."""
    dead_rows: Tensor
    """Share of rows that see keys and have no weight; their gradient is zero."""


class AttentionSums(NamedTuple):
    """Sums over rows and heads for each of A attentions; all fields are [A]."""

    normalisation: Tensor
    entropy: Tensor
    sampled: Tensor
    """Number of rows with a weight whose entropy was recorded."""
    live: Tensor
    """Number of rows with a weight."""
    rows: Tensor
    """Number of rows that are not padding and see a key."""


def translation_loss(
    logits: Tensor, target: Tensor, *, pad_id: int, smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Cross-entropy summed over the target tokens that are not padding.

    Sums can be added over accumulated batches and processes; divide by the number of tokens.

    Args:
        logits: [B, T, vocabulary].
        target: Token ids [B, T].
        pad_id: Id of padding.
        smoothing: Label smoothing.

    Returns:
        Smoothed cross-entropy, and negative log-likelihood without gradient, both scalars.
    """
    # In half precision, the sum over the vocabulary would lose its tail.
    precise = torch.promote_types(logits.dtype, torch.float32)
    # Both losses share the log-probabilities; `cross_entropy` would compute them for each.
    log_p = functional.log_softmax(logits.flatten(0, 1), dim=-1, dtype=precise)  # [B T, vocabulary]
    labels = target.flatten()
    nll = functional.nll_loss(log_p, labels, ignore_index=pad_id, reduction="sum")
    if smoothing == 0:
        return nll, nll.detach()
    uniform = -log_p.mean(dim=-1).masked_fill(labels == pad_id, 0.0).sum()
    return (1 - smoothing) * nll + smoothing * uniform, nll.detach()


def attention_sums(records: Sequence[AttentionRecord], margin: float = MARGIN) -> AttentionSums:
    """Sums and counts over the rows of each record of a forward pass.

    Args:
        records: At least one record with row sums.
        margin: Entropy up to this factor times ln n is not penalised.
    """
    by_shape: dict[tuple[object, ...], list[int]] = {}
    for index, record in enumerate(records):
        stats = record.stats
        key = (stats.row_sum.shape, stats.entropy is None, _sampled(record) is None)
        by_shape.setdefault(key, []).append(index)
    sums: dict[int, tuple[Tensor, ...]] = {}
    for indices in by_shape.values():
        # Attentions of one shape are stacked: on a GPU, launching these small operations takes
        # longer than running them.
        columns = _sums_over_rows([records[index] for index in indices], margin)
        rows = zip(*(column.unbind() for column in columns), strict=True)
        sums |= zip(indices, rows, strict=True)
    in_order = (sums[index] for index in range(len(records)))
    return AttentionSums(*(torch.stack(column) for column in zip(*in_order, strict=True)))


def attention_losses(records: Sequence[AttentionRecord], margin: float = MARGIN) -> AttentionLosses:
    """Regularisers of a forward pass; arguments as in `attention_sums`."""
    return mean_losses(attention_sums(records, margin))


def mean_losses(sums: AttentionSums, counts: AttentionSums | None = None) -> AttentionLosses:
    """Regularisers from sums over rows.

    Args:
        sums: Sums over the rows of this process.
        counts: Sums whose counts are divided by; None takes `sums`. With the counts of all
            processes, the losses of the processes add up to the loss of the global batch.
    """
    counts = sums if counts is None else counts
    sampled, live, rows = (count.clamp_min(1) for count in counts[2:])
    return AttentionLosses(
        normalisation=(sums.normalisation / live).sum(),
        entropy=(sums.entropy / sampled).sum(),
        dead_rows=((sums.rows - sums.live) / rows).mean(),
    )


def expert_balance_loss(choices: Tensor, totals: Tensor | None = None) -> Tensor:
    """Negative entropy of the mean choice of experts, summed over layers (sigma-MoE).

    The loss is lowest, -ln(experts) for each layer, when all experts are used alike.

    Args:
        choices: Expected number of tokens of each expert in each layer, [layers, experts].
        totals: `choices` summed over all processes; None for one process. With totals, the losses
            and gradients of the processes add up to those of the global batch.
    """
    totals = (choices if totals is None else totals).detach()
    tokens = totals.sum(dim=-1, keepdim=True).clamp_min(1)
    log_mean = (totals / tokens).clamp_min(torch.finfo(totals.dtype).tiny).log()
    # The gradient of p ln p is ln p + 1, and its constant cancels: choices of a token sum to 1.
    return (choices / tokens * log_mean).sum()


def _sampled(record: AttentionRecord) -> Tensor | None:
    return record.stats.sampled if isinstance(record.stats, RowSums) else None


def _sums_over_rows(records: Sequence[AttentionRecord], margin: float) -> tuple[Tensor, ...]:
    """Fields of `AttentionSums` for records of one shape."""
    row_sum = torch.stack([record.stats.row_sum for record in records])
    visible = _stacked([record.stats.visible for record in records], row_sum)
    valid = _stacked([record.valid for record in records], row_sum)
    seen = valid & (visible > 0)
    live = seen & has_weight(row_sum)
    # Dead rows are excluded: their logarithm or its gradient is infinite.
    distance = _distance_from_one(torch.where(live, row_sum, 1.0)).sum((1, 2, 3))
    counts = torch.stack([live, seen]).sum((2, 3, 4))
    entropies = [rows for record in records if (rows := record.stats.entropy) is not None]
    if not entropies:
        return distance, torch.zeros_like(distance), counts[0], *counts
    masks = [mask for record in records if (mask := _sampled(record)) is not None]
    sampled = live & _stacked(masks, row_sum) if masks else live
    cap = margin * visible.clamp_min(1).log()
    excess = torch.where(sampled, (torch.stack(entropies) - cap).clamp_min(0), 0.0)
    return distance, excess.sum((1, 2, 3)), sampled.sum((1, 2, 3)), *counts


def _stacked(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """Stack A tensors, each broadcast to [B, H, T], as [A, B, H, T], the shape of `like`."""
    return torch.stack([part.expand(like.shape[1:]) for part in parts])


def _distance_from_one(row_sum: Tensor) -> Tensor:
    """|ln row_sum|. The gradient, 1 / row_sum, is large where a row has almost no weight."""
    return row_sum.log().abs()
