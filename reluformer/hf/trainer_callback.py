"""A callback of transformers' `Trainer`: losses of the attentions, and their statistics."""

from typing import Any

from torch import nn
from transformers import TrainerCallback

from reluformer.errors import UserError
from reluformer.hf.pretrained_model import ReLUFormerPreTrainedModel
from reluformer.hf.statistics import AttentionSummary, recording, summarise
from reluformer.nn.core import AttentionCore


class ReLUAttentionCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Adds the normalisation and entropy losses to a model and logs statistics of its attentions.

    The losses are those of Shen et al. 2023, Eq. 7: `row_loss` pulls the row sums towards 1, and
    `entropy_loss` penalises rows whose entropy is above 0.7 ln n. Both act in the backward pass of
    each attention (`reluformer.nn.core.AttentionCore`), so the logged loss does not contain them.
    The callback divides them by the number of gradient accumulation steps, as the trainer divides
    its own loss.

    The attentions may be those of `reluformer.hf` and of `reluformer.nn`, also in models that are
    not of transformers, and those of `ReLUFormerForConditionalGeneration` and
    `ReLUFormerForCausalLM`.

    Each log gets `row_sum`, `entropy`, `zeros` and `dead_rows`, means over a sample of rows of the
    step before; models that are compiled as a whole log none of them.

    Args:
        row_loss: Weight of the row-sum loss; None keeps the weights of the model.
        entropy_loss: Weight of the entropy loss; None keeps the weights of the model.
        log: Whether to log statistics.
    """

    def __init__(
        self, row_loss: float | None = None, entropy_loss: float | None = None, log: bool = True
    ) -> None:
        for name, weight in (("row_loss", row_loss), ("entropy_loss", entropy_loss)):
            if weight is not None and not weight >= 0:
                raise UserError(f"{name} must be a number of at least 0, got {weight!r}")
        self.row_loss, self.entropy_loss, self.log = row_loss, entropy_loss, log
        self.summary: AttentionSummary | None = None
        self._parts: list[AttentionCore | ReLUFormerPreTrainedModel] = []
        self._recording: Any = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any
    ) -> None:
        """Set the weights of the losses."""
        kinds = (AttentionCore, ReLUFormerPreTrainedModel)
        self._parts = [module for module in model.modules() if isinstance(module, kinds)]
        if not self._parts:
            raise UserError(
                "ReLUAttentionCallback needs a model with an attention of reluformer.hf or "
                f"reluformer.nn, and {type(model).__name__} has none"
            )
        for part in self._parts:
            if self.row_loss or self.entropy_loss:
                _check_regularisable(part)
            if self.row_loss is not None:
                part.row_loss = self.row_loss
            if self.entropy_loss is not None:
                part.entropy_loss = self.entropy_loss

    def on_step_begin(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Scale the losses as the trainer scales its own, and record steps that are logged."""
        scaler = getattr(optimizer, "scaler", None)
        scale = 1.0 if scaler is None else float(scaler.get_scale())
        for part in self._parts:
            part.row_loss_scale = scale / args.gradient_accumulation_steps
        every = max(int(state.logging_steps or 1), 1)
        step = state.global_step + 1
        if self.log and (step % every == 0 or (step == 1 and args.logging_first_step)):
            self._recording = recording(self._parts)
            self._records = self._recording.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Summarise a recorded step."""
        if self._recording is not None:
            self._recording.__exit__(None, None, None)
            self._recording = None
            self.summary = summarise(self._records)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Reset the scale of the losses, for training loops without accumulation."""
        for part in self._parts:
            part.row_loss_scale = 1.0

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Add the statistics to a log of the training loss."""
        if logs is None or "loss" not in logs or self.summary is None:
            return
        logs.update(self.summary._asdict())
        if state.log_history:
            state.log_history[-1].update(self.summary._asdict())


def _check_regularisable(part: AttentionCore | ReLUFormerPreTrainedModel) -> None:
    """Refuse losses for attentions that have no row sums to act on."""
    if isinstance(part, AttentionCore):
        name, is_regularisable = part.row.name, part.row.regularisable
    else:
        config = part.model.config
        name, is_regularisable = config.attention.kind, bool(config.regularisable_sites)
    if not is_regularisable:
        raise UserError(
            f"row_loss and entropy_loss must be 0 for {name} attention, which is not rectified or "
            "has an output norm"
        )
