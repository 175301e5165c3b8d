"""Stored settings of earlier versions, converted to the current field names.

Every reader of settings that a run has written itself (`config.json`, `recipe.yaml`,
`metrics.jsonl`) calls `migrate`. Recipes written by hand are not converted: an old name there is
an unknown field, and the error suggests the new one.
"""

from collections.abc import Mapping
from typing import Any

RENAMED_FIELDS = {
    "normalise": "row_normalise",
    "temper": "rescale_scores",
    "tempered": "rescaled",
}
"""Current name of each field by its earlier one. The names are unambiguous at every depth."""

# Values under which a run continues as it began, where those differ from the defaults.
_PREDATED_TRAIN_FIELDS = {"expert_balance_weight": 0.0}


def migrate(values: Any) -> Any:
    """A copy of nested plain values with renamed fields under their current names."""
    if isinstance(values, Mapping):
        return {RENAMED_FIELDS.get(key, key): migrate(value) for key, value in values.items()}
    if isinstance(values, list):
        return [migrate(value) for value in values]
    return values


def migrate_recipe(values: Mapping[str, Any]) -> dict[str, Any]:
    """A stored recipe with current names, and with values for fields that it predates.

    Runs store every field, so a missing one is newer than the run.
    """
    recipe: dict[str, Any] = migrate(values)
    train = recipe.get("train", {})
    if isinstance(train, Mapping):
        recipe["train"] = {**_PREDATED_TRAIN_FIELDS, **train}
    return recipe
