"""Recipes: one YAML file describes one run completely."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from reluformer import recipes
from reluformer.config import yaml_lines
from reluformer.config.dataclasses_io import build, override, to_dict
from reluformer.config.migration import migrate_recipe
from reluformer.config.search import SearchConfig
from reluformer.errors import UserError
from reluformer.files import write_text
from reluformer.model.config import ModelConfig
from reluformer.model.losses import EXPERT_BALANCE_WEIGHT, MARGIN

GENERATED = ("sample", "reverse", "copy")
"""Data that is made in memory and needs no preparation."""

_FROM_TOKENIZER = ("vocabulary", "pad_id", "bos_id", "eos_id")

# What a run may change between two starts: how and where it computes, not what it computes.
_FREE_SECTIONS = ("decode",)
_FREE_FIELDS = {
    f"train.{name}"
    for name in (
        "bleu_every",
        "bleu_examples",
        "compile",
        "device",
        "graphs",
        "keep",
        "log_every",
        "parallel",
        "tensorboard",
        "threads",
    )
}


@dataclass(frozen=True)
class GeneratedConfig:
    """How much of a generated task to make."""

    train: int = 10_000
    """Documents of the sample, or pairs of letters to reverse or copy."""
    dev: int = 100
    seed: int = 0
    vocab_size: int = 1000
    """At most so many subwords; the sample and the letters need fewer than real text."""
    symbols: int = 10
    """Different letters of the tasks `reverse` and `copy`."""
    lengths: tuple[int, ...] = (1, 10)
    """Fewest and most letters (`reverse`, `copy`) or sentences of a document (`sample`)."""

    def __post_init__(self) -> None:
        _at_least(1, self, "train", "dev", "symbols")
        _at_least(260, self, "vocab_size")
        if len(self.lengths) != 2 or not 1 <= self.lengths[0] <= self.lengths[1]:
            raise UserError(
                f"lengths must be two whole numbers, 1 <= fewest <= most, got {list(self.lengths)}"
            )
        if self.symbols > 26:
            raise UserError(f"symbols must be at most 26, got {self.symbols}")


@dataclass(frozen=True)
class DataConfig:
    """What is learnt from."""

    source: str
    """`sample`, `reverse` or `copy`, made in memory, or the folder that `prepare` wrote."""
    direction: Literal["forward", "backward"] = "forward"
    """`backward` swaps source and target."""
    unit: Literal["sentence", "document"] = "sentence"
    """One sentence an example, or as many consecutive ones as fit into `max_length`."""
    max_length: int = 256
    """Most ids of an example on either side."""
    cross_documents: bool = False
    """Fill examples across the borders of documents."""
    generated: GeneratedConfig | None = None

    def __post_init__(self) -> None:
        _at_least(2, self, "max_length")
        if self.cross_documents and self.unit == "sentence":
            raise UserError("cross_documents must be false when data.unit is sentence, got true")
        if self.source in GENERATED:
            if self.generated is None:
                object.__setattr__(self, "generated", GeneratedConfig())
        elif self.generated is not None:
            raise UserError(
                f"generated needs data.source to be one of {', '.join(GENERATED)}, "
                f"got {self.source!r}"
            )


@dataclass(frozen=True)
class TrainConfig:
    """How it is learnt."""

    steps: int = 100_000
    start_from: str | None = None
    """A run's folder whose finished weights this run begins with, for instance one trained on
    shorter examples. Gamma is one of them and is then not calibrated."""
    seed: int = 1
    batch_tokens: int = 4096
    """Ids of a batch on its longer side, padding included, over all processes together."""
    accumulate: int = 1
    """Batches whose gradients make one step."""
    lr: float = 5e-4
    """Peak of the learning rate."""
    warmup: int = 4000
    schedule: Literal["inverse_sqrt", "cosine"] = "inverse_sqrt"
    betas: tuple[float, ...] = (0.9, 0.98)
    weight_decay: float = 1e-4
    clip: float | None = 1.0
    """Largest norm of the gradient."""
    smoothing: float = 0.1
    normalisation_weight: float = 0.001
    """Of the loss that pulls row sums, before rows are divided by them, to 1; rectified attentions
    only. Summed over attentions. The paper does not say its weight."""
    entropy_weight: float = 0.0
    """Of the loss on entropy above a margin; rectified attentions only. At 0 it is not computed."""
    entropy_margin: float = MARGIN
    """Entropy of a row that sees n keys costs nothing up to this times ln n."""
    entropy_every: int = 1
    """Compute that loss on one block of 256 query rows in so many, another in each head and
    example; 1 takes all rows."""
    expert_balance_weight: float | None = None
    """Weight of the loss that keeps all experts of a sigma_moe memory in use, summed over layers.
    None is the 0.001 of its paper with such a memory, and 0 without."""
    regulariser_warmup: int = 0
    """Steps over which both weights rise from 0."""
    sample_rows: int | None = None
    """Compute both losses on so many random query rows of each attention; None takes all."""
    calibration_batches: int = 8
    """Batches that set gamma before the first step."""
    log_every: int = 50
    checkpoint_every: int = 1000
    keep: int = 5
    """Checkpoints that stay on disk."""
    dev_every: int | None = 1000
    bleu_every: int | None = None
    bleu_examples: int = 200
    patience: int | None = None
    """Stop after so many measurements of the dev loss without a new best."""
    final: Literal["last", "best", "average", "ema"] = "last"
    """Weights of the finished model: the last, those with the best dev loss, the mean of the last
    `average_last` checkpoints, or the moving average `ema`."""
    average_last: int = 5
    ema: float | None = None
    """Decay of an exponential moving average of the weights."""
    rescale_scores: bool = False
    """Multiply the finished model's attention scores by the factor with the lowest dev loss."""
    explosion: float | None = 3.0
    """Stop when the loss of a logging interval is so many nats above the lowest so far."""
    precision: Literal["float32", "bfloat16"] | None = None
    """None: bfloat16 autocast on a GPU, float32 on a CPU."""
    compile: bool | None = None
    """Compile the layers; None: on a GPU. Steps with regularisers run compiled only where fused
    kernels make what these need: not with `sample_rows`, nor on a CPU."""
    graphs: bool | None = None
    """Record each shape of batch as a CUDA graph; None: on one GPU, unless `deterministic`."""
    deterministic: bool = False
    """Refuse operations whose result may differ from run to run on a GPU."""
    device: Literal["cpu", "cuda"] | None = None
    threads: int | None = None
    """On a CPU; results agree to the bit for one number of threads. None: one for each core."""
    parallel: Literal["replicate", "shard"] = "replicate"
    """Over several processes: the model on each (DDP), or its weights divided (FSDP)."""
    tensorboard: bool = False

    def __post_init__(self) -> None:
        _at_least(
            1, self, "steps", "batch_tokens", "accumulate", "log_every", "checkpoint_every", "keep"
        )
        _at_least(1, self, "entropy_every", "calibration_batches", "bleu_examples", "average_last")
        _at_least(1, self, "dev_every", "bleu_every", "patience", "sample_rows", "threads")
        _at_least(0, self, "seed", "warmup", "regulariser_warmup")
        _at_least(0, self, "weight_decay", "normalisation_weight", "entropy_weight")
        _at_least(0, self, "entropy_margin", "expert_balance_weight")
        _above_zero(self, "lr", "clip", "explosion")
        _share(self, "smoothing", "ema")
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


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a run. `model` lacks what the tokenizer decides."""

    data: DataConfig
    model: ModelConfig
    train: TrainConfig = field(default_factory=TrainConfig)
    decode: SearchConfig = field(default_factory=SearchConfig)
    """How the finished model translates unless told otherwise."""

    def __post_init__(self) -> None:
        if self.model.encoder_layers < 1:
            raise UserError(
                f"model.encoder_layers must be at least 1, got {self.model.encoder_layers}"
            )
        if self.train.expert_balance_weight is None:
            weight = EXPERT_BALANCE_WEIGHT if self.model.memory == "sigma_moe" else 0.0
            train = dataclasses.replace(self.train, expert_balance_weight=weight)
            object.__setattr__(self, "train", train)
        # Batches round lengths up to multiples of 8.
        longest = -(-self.data.max_length // 8) * 8
        if self.train.batch_tokens < longest:
            raise UserError(
                f"train.batch_tokens must be at least {longest} to hold one example of "
                f"data.max_length = {self.data.max_length}, got {self.train.batch_tokens}"
            )

    def model_with(self, vocabulary: int) -> ModelConfig:
        """The model's settings once the size of the vocabulary is known."""
        return dataclasses.replace(self.model, vocabulary=vocabulary)

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values; `recipe_from` of them gives an equal recipe."""
        values = to_dict(self)
        for name in _FROM_TOKENIZER:
            del values["model"][name]
        return values

    def identity(self) -> dict[str, Any]:
        """By dotted path, the fields that must be the same for a run to be continued."""
        fields = _flatten(self.to_dict())
        return {
            path: value
            for path, value in fields.items()
            if path not in _FREE_FIELDS and path.split(".", 1)[0] not in _FREE_SECTIONS
        }

    @property
    def hash(self) -> str:
        """Names the recipe: 16 hexadecimal digits of a checksum of `identity`."""
        text = json.dumps(self.identity(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def save(self, path: Path) -> None:
        """Write every field, defaults included, as a recipe."""
        write_text(path, yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True))


def load_recipe(source: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Load a recipe and apply overrides.

    Args:
        source: Path of a YAML file, or the name of a shipped recipe. Text without a folder and
            without a suffix is a name.
        overrides: Assignments such as `"train.lr=1e-3"`; each value is parsed as YAML.

    Raises:
        UserError: The message names the wrong field, and its line in the file or its override.
    """
    path = Path(source)
    if not path.suffix and len(path.parts) == 1 and str(source) == path.name:
        path = recipes.path(path.name)
    document = yaml_lines.read(path)
    assigned = yaml_lines.assignments(overrides)
    try:
        return recipe_from(override(document.values, assigned))
    except UserError as error:
        raise document.located(error, assigned) from None


def load_stored_recipe(path: Path) -> Recipe:
    """The recipe that a run of this or an earlier version has stored in its folder."""
    document = yaml_lines.read(path)
    try:
        return recipe_from(migrate_recipe(document.values))
    except UserError as error:
        raise document.located(error, {}) from None


def recipe_from(values: Mapping[str, Any]) -> Recipe:
    """A recipe from nested plain values, strictly."""
    model = values.get("model", {})
    if isinstance(model, Mapping):
        for name in _FROM_TOKENIZER:
            if name in model:
                raise UserError(f"model.{name} comes from the tokenizer and cannot be set")
        # A stand-in until the tokenizer is known.
        model = {**model, "vocabulary": 1}
    return build(Recipe, {**values, "model": model})


def first_difference(found: Recipe, wanted: Recipe) -> str | None:
    """The first field that keeps `wanted` from continuing a run of `found`, in words."""
    there, here = found.identity(), wanted.identity()
    for path in [*there, *here]:
        if there.get(path) != here.get(path):
            return f"{path} is {there.get(path)!r} there and {here.get(path)!r} here"
    return None


def _flatten(values: Mapping[str, Any], parent: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{parent}.{key}" if parent else key
        flat.update(_flatten(value, path) if isinstance(value, dict) else {path: value})
    return flat


def _at_least(least: int, settings: object, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value is not None and not least <= value < math.inf:
            raise UserError(f"{name} must be at least {least}, got {value}")


def _above_zero(settings: object, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{name} must be finite and greater than 0, got {value}")


def _share(settings: object, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value is not None and not 0 <= value < 1:
            raise UserError(f"{name} must be in [0, 1), got {value}")
