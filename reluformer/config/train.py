"""Settings of training: the section `train` of a recipe."""

from dataclasses import dataclass
from typing import Literal

from reluformer.config.checks import check_above_zero, check_at_least, check_fraction
from reluformer.config.schema import check_fields
from reluformer.errors import UserError
from reluformer.model.losses import MARGIN

_MOST_THREADS = 256


@dataclass(frozen=True)
class TrainConfig:
    """Optimisation, regularisation, checkpoints, validation and devices."""

    steps: int = 100_000
    """Number of optimiser steps."""
    start_from: str | None = None
    """Folder of a run whose finished weights initialise this run, for instance a run on shorter
    examples, or `shipped` for the model of the package. Gamma is one of the weights and is then
    not calibrated."""
    seed: int = 1
    """Seed of initialisation, order of the batches and dropout."""
    batch_tokens: int = 4096
    """Ids of a global batch on its longer side, padding included."""
    accumulate: int = 1
    """Batches whose gradients are summed in one step."""
    lr: float = 5e-4
    """Peak learning rate."""
    warmup: int = 4000
    """Steps of linear warm-up."""
    schedule: Literal["inverse_sqrt", "cosine"] = "inverse_sqrt"
    """Decay of the learning rate after the warm-up."""
    betas: tuple[float, ...] = (0.9, 0.98)
    """Adam's decay rates."""
    weight_decay: float = 1e-4
    """Decoupled weight decay of Adam."""
    clip: float | None = 1.0
    """Largest gradient norm; None does not clip."""
    smoothing: float = 0.1
    """Label smoothing."""
    normalisation_weight: float = 0.001
    """Weight of the loss that pulls unnormalised row sums towards 1, summed over attentions;
    rectified attentions only. The paper does not state its weight."""
    entropy_weight: float = 0.0
    """Weight of the loss on entropy above a margin; rectified attentions only. 0 skips it."""
    entropy_margin: float = MARGIN
    """The entropy of a row that sees n keys is free up to this times ln n."""
    entropy_every: int = 1
    """Compute the entropy loss on one of this many blocks of 256 query rows, a different block for
    each head and example; 1 uses all rows."""
    expert_balance_weight: float | None = None
    """Weight of the loss that keeps all experts of a sigma_moe memory in use, summed over layers.
    None is the 0.001 of its paper with such a memory, and 0 without."""
    regulariser_warmup: int = 0
    """Steps over which the weights of both attention losses rise from 0."""
    sample_rows: int | None = None
    """Compute both attention losses on this many random query rows; None uses all rows."""
    calibration_batches: int = 8
    """Batches that calibrate gamma before the first step."""
    log_every: int = 50
    """Steps between log lines."""
    checkpoint_every: int = 1000
    """Steps between checkpoints."""
    keep: int = 5
    """Number of checkpoints kept on disk."""
    dev_every: int | None = 1000
    """Steps between measurements of the dev loss; None does not measure it."""
    bleu_every: int | None = None
    """Steps between measurements of dev BLEU; None does not measure it."""
    bleu_examples: int = 200
    """Number of dev examples that are translated for BLEU."""
    patience: int | None = None
    """Stop after this many measurements of the dev loss without a new best."""
    final: Literal["last", "best", "average", "ema"] = "last"
    """Weights of the finished model: the last, those with the best dev loss, the mean of the last
    `average_last` checkpoints, or the moving average `ema`."""
    average_last: int = 5
    """Number of checkpoints averaged by `final: average`."""
    ema: float | None = None
    """Decay of an exponential moving average of the weights; None keeps none."""
    rescale_scores: bool = False
    """Multiply the finished model's attention scores by the factor with the lowest dev loss."""
    explosion: float | None = 3.0
    """Stop when the loss of a logging interval exceeds the lowest so far by this many nats."""
    precision: Literal["float32", "bfloat16"] | None = None
    """None: bfloat16 autocast on a GPU, float32 on a CPU."""
    compile: bool | None = None
    """Compile the layers; None: on a GPU. Steps with attention losses run compiled only if fused
    kernels compute the inputs of these losses: not with `sample_rows`, and not on a CPU."""
    graphs: bool | None = None
    """Record a CUDA graph for each batch shape; None: on one GPU, unless `deterministic`."""
    deterministic: bool = False
    """Refuse GPU operations whose result may differ between runs."""
    device: Literal["cpu", "cuda"] | None = None
    """None: a GPU if there is one."""
    threads: int | None = None
    """CPU threads; None: one for each core. Results are bit-identical for equal numbers."""
    parallel: Literal["replicate", "shard"] = "replicate"
    """With several processes: a copy of the model on each (DDP), or sharded weights (FSDP)."""
    tensorboard: bool = False
    """Also write TensorBoard logs."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_at_least(1, self, "steps", "batch_tokens", "accumulate", "log_every", "keep")
        check_at_least(1, self, "checkpoint_every", "entropy_every", "calibration_batches")
        check_at_least(1, self, "bleu_examples", "average_last", "dev_every", "bleu_every")
        check_at_least(1, self, "patience", "sample_rows", "threads")
        if self.threads is not None and self.threads > _MOST_THREADS:
            raise UserError(f"threads must be at most {_MOST_THREADS}, got {self.threads}")
        check_at_least(0, self, "seed", "warmup", "regulariser_warmup")
        check_at_least(0, self, "weight_decay", "normalisation_weight", "entropy_weight")
        check_at_least(0, self, "entropy_margin", "expert_balance_weight")
        check_above_zero(self, "lr", "clip", "explosion")
        check_fraction(self, "smoothing", "ema")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"betas must be two numbers in [0, 1), got {list(self.betas)}")
        if self.sample_rows is not None and self.entropy_every > 1:
            raise UserError(
                f"entropy_every must be 1 when train.sample_rows is set, got {self.entropy_every}"
            )
        self._check_final()

    def _check_final(self) -> None:
        if self.patience is not None and self.dev_every is None:
            raise UserError("patience needs train.dev_every, which is not set")
        if self.final == "best" and self.dev_every is None:
            raise UserError("final best needs train.dev_every, which is not set")
        if self.rescale_scores and self.dev_every is None:
            raise UserError("rescale_scores needs train.dev_every, which is not set")
        if self.final == "ema" and self.ema is None:
            raise UserError("final ema needs train.ema, which is not set")
        if self.final == "average" and self.average_last > self.keep:
            raise UserError(
                f"average_last must be at most train.keep = {self.keep}, got {self.average_last}"
            )
