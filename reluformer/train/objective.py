"""One step's losses and gradients, the same for any number of processes."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from reluformer.config.recipe import TrainConfig
from reluformer.data.batches import Batch
from reluformer.model.attention import opaque
from reluformer.model.config import ModelConfig, Site
from reluformer.model.losses import AttentionSums, attention_sums, mean_losses, translation_loss
from reluformer.model.records import AttentionRecord, Record
from reluformer.ops.family.table import lookup
from reluformer.processes import Processes
from reluformer.train.data_parallel import Parallel
from reluformer.train.schedules import regulariser_share

_SITES: tuple[Site, ...] = ("encoder", "decoder", "cross")


@dataclass(frozen=True)
class Objective:
    """What is minimised: smoothed cross-entropy per token of the global batch, and regularisers.

    The regularisers are means over the rows of a global batch; of the batches that make one step
    each counts by its share of the tokens.
    """

    config: TrainConfig
    model: ModelConfig
    group: Processes
    autocast: Callable[[], AbstractContextManager[object]]
    cross_entropy: Callable[..., tuple[Tensor, Tensor]] = translation_loss
    replay: Callable[[Batch, Tensor], Tensor] | None = None
    """Stands in for `add_gradients`."""

    @cached_property
    def regularised(self) -> frozenset[Site]:
        """Sites whose attention the regularisers are for."""
        if self.config.normalisation_weight == 0 and self.config.entropy_weight == 0:
            return frozenset()
        rows = {site: lookup(self.model.attention_at(site).kind) for site in _SITES}
        return frozenset(site for site, row in rows.items() if row.regularisable)

    @cached_property
    def record(self) -> Record:
        """What attentions must report for the regularisers, and no more."""
        if not self.regularised:
            return "nothing"
        return "row_sum" if self.config.entropy_weight == 0 else "entropy"

    @cached_property
    def compilable(self) -> bool:
        """Whether layers may run compiled while they record."""
        # Out of a fused kernel, sums are results of an operator that compilers do not look into.
        # Those of the reference are reductions over its weights, and on those Inductor fails on
        # Hopper (torch 2.11); a sample of rows is made by the reference.
        return not self.regularised or (
            self.config.sample_rows is None
            and all(
                opaque(self.model, self.model.attention_at(site), self.record, self.group.device)
                for site in self.regularised
            )
        )

    def backward(self, parallel: Parallel, batches: Sequence[Batch], step: int) -> Tensor:
        """Add the gradients of one step's batches.

        Returns this process's part of the step's losses [4]: the loss that is minimised, negative
        log-likelihood per token, both regularisers. The parts of all processes add up to the whole.
        """
        tokens = sum(batch.target_tokens for batch in batches)
        total = torch.zeros(4, device=self.group.device)
        for number, batch in enumerate(batches, 1):
            share = batch.target_tokens / tokens
            warm = regulariser_share(self.config, step)
            # On the device, because a recorded step sees new numbers only there.
            numbers = torch.tensor([1 / tokens, share, share * warm]).to(self.group.device)
            with parallel.sharing(number == len(batches)):
                if self.replay is not None:
                    total += self.replay(batch, numbers)
                else:
                    total += self.add_gradients(parallel, batch, numbers)
        return total

    def add_gradients(self, parallel: Parallel, batch: Batch, numbers: Tensor) -> Tensor:
        """Add one batch's gradients; return its contribution [4] to the step's losses.

        `numbers` [3] are 1 / (tokens of the step), the batch's share of them, and that share times
        how far the regularisers have warmed up.
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
        per_token, share, warm_share = numbers.unbind()
        loss = smooth * per_token + warm_share * (
            self.config.normalisation_weight * normalisation + self.config.entropy_weight * entropy
        )
        # Peers average their gradients; sums are wanted.
        (loss * self.group.world).backward()  # type: ignore[no-untyped-call]
        parts = [loss, nll * per_token, share * normalisation, share * entropy]
        return torch.stack([part.detach() for part in parts])

    def _regularisers(self, records: Sequence[AttentionRecord]) -> tuple[Tensor, Tensor]:
        if not records:
            zero = torch.zeros((), device=self.group.device)
            return zero, zero
        sums = attention_sums(records, self.config.entropy_margin)
        counts = self.group.add(torch.stack(sums[2:]))
        losses = mean_losses(sums, AttentionSums(sums.normalisation, sums.entropy, *counts))
        return losses.normalisation, losses.entropy


def inputs(batch: Batch) -> dict[str, Tensor]:
    """A batch as keywords of the model's `forward`."""
    return {
        "source": batch.source,
        "target": batch.target_in,
        "source_lengths": batch.source_lengths,
        "target_lengths": batch.target_lengths,
    }


def real_rows(records: Sequence[AttentionRecord], batch: Batch) -> tuple[AttentionRecord, ...]:
    """`records` without the rows that only fill the batch's shape."""
    real = (batch.target_lengths > 0).view(-1, 1, 1)
    return tuple(record._replace(valid=record.valid & real) for record in records)
