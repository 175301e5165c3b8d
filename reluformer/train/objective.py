"""Losses and gradients of one training step, the same for any number of processes."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from reluformer.config.train import TrainConfig
from reluformer.data.batches import Batch
from reluformer.model.config import ModelConfig, Site
from reluformer.model.losses import (
    AttentionSums,
    attention_sums,
    expert_balance_loss,
    mean_losses,
    translation_loss,
)
from reluformer.model.recording import is_opaque
from reluformer.model.records import AttentionRecord, Record
from reluformer.processes import Processes
from reluformer.train.data_parallel import Parallel
from reluformer.train.schedules import regulariser_share

LOSSES = ("loss", "nll", "normalisation", "entropy", "expert_balance")
"""Losses that a step reports, in order: the minimised loss, negative log-likelihood per token, and
the regularisers without their weights."""


@dataclass(frozen=True)
class Objective:
    """The minimised loss: smoothed cross-entropy per token of the global batch plus regularisers.

    The regularisers of attentions and experts are means over the rows of a global batch. With
    gradient accumulation, each batch is weighted by its share of the tokens.
    """

    config: TrainConfig
    model: ModelConfig
    group: Processes
    autocast: Callable[[], AbstractContextManager[object]]
    cross_entropy: Callable[..., tuple[Tensor, Tensor]] = translation_loss
    replay: Callable[[Batch, Tensor], Tensor] | None = None
    """Replacement for `add_gradients`, such as the replay of a CUDA graph."""

    @cached_property
    def regularised(self) -> frozenset[Site]:
        """Sites whose attention has regularisers."""
        if self.config.normalisation_weight == 0 and self.config.entropy_weight == 0:
            return frozenset()
        return self.model.regularisable_sites

    @cached_property
    def record(self) -> Record:
        """Level of statistics that the regularisers need from the attentions."""
        if not self.regularised:
            return "nothing"
        return "row_sum" if self.config.entropy_weight == 0 else "entropy"

    @cached_property
    def compilable(self) -> bool:
        """Whether layers can run compiled while they record."""
        # Sums of a fused kernel are outputs of an operator that is opaque to the compiler. Sums of
        # the reference are reductions over its weights, and Inductor fails on those on Hopper
        # (torch 2.11). The reference also computes samples of rows.
        return not self.regularised or (
            self.config.sample_rows is None
            and all(
                is_opaque(self.model, self.model.attention_at(site), self.record, self.group.device)
                for site in self.regularised
            )
        )

    def backward(self, parallel: Parallel, batches: Sequence[Batch], step: int) -> Tensor:
        """Add the gradients of the batches of step number `step`.

        Returns:
            `LOSSES` [5] of this process; the sum over all processes is the loss of the step.
        """
        tokens = sum(batch.target_tokens for batch in batches)
        total = torch.zeros(len(LOSSES), device=self.group.device)
        for number, batch in enumerate(batches, 1):
            share = batch.target_tokens / tokens
            warm = regulariser_share(self.config, step)
            # A tensor, because a CUDA graph can only read numbers that are on the device.
            numbers = torch.tensor([1 / tokens, share, share * warm]).to(self.group.device)
            with parallel.sharing(number == len(batches)):
                if self.replay is not None:
                    total += self.replay(batch, numbers)
                else:
                    total += self.add_gradients(parallel, batch, numbers)
        return total

    def add_gradients(self, parallel: Parallel, batch: Batch, numbers: Tensor) -> Tensor:
        """Add the gradients of one batch.

        Args:
            parallel: The model.
            batch: The part of a global batch that this process computes.
            numbers: [3]: 1 / (tokens of the step), the batch's share of these tokens, and that
                share times the warm-up factor of the attention regularisers.

        Returns:
            The batch's contribution to `LOSSES`, [5].
        """
        stance = nullcontext() if self.compilable else torch.compiler.set_stance("force_eager")
        with self.autocast(), stance:
            output = parallel.forward(
                **inputs(batch),
                record=self.record,
                sample_rows=self.config.sample_rows,
                entropy_every=self.config.entropy_every,
            )
            smooth, nll = self.cross_entropy(
                output.logits,
                batch.target_out,
                pad_id=self.model.pad_id,
                smoothing=self.config.smoothing,
            )
        normalisation, entropy = self._regularisers(real_rows(output.records, batch))
        balance = self._expert_balance(output.expert_choices, batch)
        per_token, share, warm_share = numbers.unbind()
        loss = smooth * per_token + warm_share * (
            self.config.normalisation_weight * normalisation + self.config.entropy_weight * entropy
        )
        if self.config.expert_balance_weight:
            loss = loss + share * self.config.expert_balance_weight * balance
        # Data parallelism averages the gradients of the processes, and the sum is needed.
        (loss * self.group.world).backward()  # type: ignore[no-untyped-call]
        regularisers = (normalisation, entropy, balance)
        parts = [loss, nll * per_token, *(share * value for value in regularisers)]
        return torch.stack([part.detach() for part in parts])

    def _regularisers(self, records: Sequence[AttentionRecord]) -> tuple[Tensor, Tensor]:
        """Normalisation and entropy loss, this process's part."""
        if not records:
            zero = torch.zeros((), device=self.group.device)
            return zero, zero
        sums = attention_sums(records, self.config.entropy_margin)
        counts = self.group.add(torch.stack(sums[2:]))
        losses = mean_losses(sums, AttentionSums(sums.normalisation, sums.entropy, *counts))
        return losses.normalisation, losses.entropy

    def _expert_balance(self, by_layer: Sequence[Tensor], batch: Batch) -> Tensor:
        """Expert balance loss from choices [B, experts] of each layer, this process's part."""
        if not by_layer or not self.config.expert_balance_weight:
            return torch.zeros((), device=self.group.device)
        real = (batch.target_lengths > 0).view(-1, 1)
        choices = torch.stack([(layer * real).sum(dim=0) for layer in by_layer])
        return expert_balance_loss(choices, self.group.add(choices.detach().clone()))


def inputs(batch: Batch) -> dict[str, Tensor]:
    """Keyword arguments of the model's `forward` for a batch."""
    return {
        "source": batch.source,
        "target": batch.target_in,
        "source_lengths": batch.source_lengths,
        "target_lengths": batch.target_lengths,
    }


def real_rows(records: Sequence[AttentionRecord], batch: Batch) -> tuple[AttentionRecord, ...]:
    """`records` with the examples that only fill the shape of the batch marked as padding."""
    real = (batch.target_lengths > 0).view(-1, 1, 1)
    return tuple(record._replace(valid=record.valid & real) for record in records)
