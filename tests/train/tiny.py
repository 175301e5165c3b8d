"""The smallest recipe that trains: some letters to reverse, one small layer on each side."""

from typing import Any

from reluformer.config.recipe import Recipe, recipe_from
from reluformer.config.schema import override

VALUES: dict[str, Any] = {
    "data": {
        "source": "reverse",
        "max_length": 16,
        "generated": {"train": 93, "dev": 20, "vocab_size": 280},
    },
    "model": {
        "width": 16,
        "heads": 2,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "slots": 16,
        "dropout": 0.1,
    },
    "train": {
        "steps": 6,
        "batch_tokens": 256,
        "lr": 5e-3,
        "warmup": 2,
        "log_every": 1,
        "checkpoint_every": 2,
        "dev_every": 3,
        "device": "cpu",
        "compile": False,
    },
}


def tiny(**fields: Any) -> Recipe:
    """The recipe with fields of its train section set, or of others as `model__dropout`."""
    assigned = {
        name.replace("__", ".") if "__" in name else f"train.{name}": value
        for name, value in fields.items()
    }
    return recipe_from(override(VALUES, assigned))
