"""Settings of the training data: the section `data` of a recipe."""

from dataclasses import dataclass
from typing import Literal

from reluformer.config.checks import check_at_least
from reluformer.config.schema import check_fields
from reluformer.errors import UserError

GENERATED = ("sample", "reverse", "copy")
"""Tasks that are generated in memory and need no preparation."""

# Generated tasks are held in memory.
_MOST_GENERATED = 10_000_000


@dataclass(frozen=True)
class GeneratedConfig:
    """Size of a generated task."""

    train: int = 10_000
    """Number of documents (`sample`) or letter sequences (`reverse`, `copy`)."""
    dev: int = 100
    """The same for validation."""
    seed: int = 0
    """Seed of the generator."""
    vocab_size: int = 1000
    """Largest vocabulary; generated text needs less than real text."""
    symbols: int = 10
    """Number of different letters of `reverse` and `copy`."""
    lengths: tuple[int, ...] = (1, 10)
    """Smallest and largest number of letters (`reverse`, `copy`) or sentences (`sample`)."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_at_least(1, self, "train", "dev", "symbols")
        check_at_least(260, self, "vocab_size")
        for name in ("train", "dev"):
            if getattr(self, name) > _MOST_GENERATED:
                raise UserError(
                    f"{name} must be at most {_MOST_GENERATED}, got {getattr(self, name)}"
                )
        if len(self.lengths) != 2 or not 1 <= self.lengths[0] <= self.lengths[1]:
            raise UserError(
                f"lengths must be two whole numbers, 1 <= fewest <= most, got {list(self.lengths)}"
            )
        if self.symbols > 26:
            raise UserError(f"symbols must be at most 26, got {self.symbols}")


@dataclass(frozen=True)
class DataConfig:
    """Training and validation data."""

    source: str
    """Folder that `prepare` wrote, or a generated task: `sample`, `reverse` or `copy`."""
    direction: Literal["forward", "backward"] = "forward"
    """`backward` swaps source and target."""
    unit: Literal["sentence", "document"] = "sentence"
    """An example is one sentence, or as many consecutive ones as fit into `max_length`."""
    max_length: int = 256
    """Longest example on either side, in ids."""
    cross_documents: bool = False
    """Let examples extend across the borders of documents."""
    mixed_lengths: bool = False
    """Cut each training document into examples of a random length of its own, from single sentences
    to `max_length`. The model then translates sentences as well as documents."""
    generated: GeneratedConfig | None = None
    """Size of the generated task; must be unset for a folder."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_at_least(2, self, "max_length")
        if self.cross_documents and self.unit == "sentence":
            raise UserError("cross_documents must be false when data.unit is sentence, got true")
        if self.mixed_lengths and (self.unit == "sentence" or self.cross_documents):
            raise UserError(
                "mixed_lengths needs data.unit document and data.cross_documents false, "
                f"got {self.unit} and {str(self.cross_documents).lower()}"
            )
        if self.source in GENERATED:
            if self.generated is None:
                object.__setattr__(self, "generated", GeneratedConfig())
        elif self.generated is not None:
            raise UserError(
                "generated must be null for a prepared folder, or data.source one of "
                f"{', '.join(GENERATED)}, got {self.source!r}"
            )
