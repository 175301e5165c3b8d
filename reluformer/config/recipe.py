"""Recipes: one YAML file describes one run completely."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from reluformer import recipes
from reluformer.config.data import DataConfig
from reluformer.config.migration import migrate_recipe
from reluformer.config.schema import build, check_fields, override, to_dict
from reluformer.config.search import SearchConfig
from reluformer.config.train import TrainConfig
from reluformer.config.yaml_lines import parse_assignments, read_yaml
from reluformer.data.tokenizer import SEP
from reluformer.errors import UserError
from reluformer.files import write_text
from reluformer.model.config import ModelConfig
from reluformer.model.losses import EXPERT_BALANCE_WEIGHT

_FROM_TOKENIZER = ("vocabulary", "pad_id", "bos_id", "eos_id")

# A resumed run may change these fields: how and where it computes, not what it computes.
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
class Recipe:
    """All settings of a run, except those of the model that follow from the tokenizer."""

    data: DataConfig
    model: ModelConfig
    train: TrainConfig = field(default_factory=TrainConfig)
    decode: SearchConfig = field(default_factory=SearchConfig)
    """Default search of the finished model."""

    def __post_init__(self) -> None:
        check_fields(self)
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
        """Settings of the model with a vocabulary of that size."""
        return dataclasses.replace(self.model, vocabulary=vocabulary)

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values; `recipe_from` restores an equal recipe from them."""
        values = to_dict(self)
        for name in _FROM_TOKENIZER:
            del values["model"][name]
        return values

    def identity(self) -> dict[str, Any]:
        """Fields, by dotted path, that must be equal for a run to be resumed."""
        fields = _flatten(self.to_dict())
        return {
            path: value
            for path, value in fields.items()
            if path not in _FREE_FIELDS and path.split(".", 1)[0] not in _FREE_SECTIONS
        }

    @property
    def hash(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of `identity`."""
        text = json.dumps(self.identity(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def save(self, path: Path) -> None:
        """Write all fields, including defaults, as YAML."""
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
    elif path.stem in recipes.names() and not path.exists():
        raise UserError(f"{path} does not exist; the shipped recipe is called {path.stem}")
    file = read_yaml(path, allow_pipe=True)
    assigned = parse_assignments(overrides)
    try:
        return recipe_from(override(file.values, assigned))
    except UserError as error:
        raise file.located(error, assigned) from None


def load_stored_recipe(path: Path) -> Recipe:
    """Load the recipe that a run of this or an earlier version stored in its folder."""
    file = read_yaml(path)
    try:
        return recipe_from(migrate_recipe(file.values))
    except UserError as error:
        raise file.located(error, {}) from None


def recipe_from(values: Mapping[str, Any]) -> Recipe:
    """Build a recipe from nested plain values; unknown fields are refused."""
    model = values.get("model", {})
    if isinstance(model, Mapping):
        for name in _FROM_TOKENIZER:
            if name in model:
                raise UserError(f"model.{name} comes from the tokenizer and cannot be set")
        # A placeholder until the tokenizer is known.
        model = {**model, "vocabulary": SEP + 1}
    return build(Recipe, {**values, "model": model})


def first_difference(stored: Recipe, requested: Recipe) -> str | None:
    """First field that prevents `requested` from resuming a run of `stored`, in words."""
    there, here = stored.identity(), requested.identity()
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
