"""Options of an attention as a layer takes them, and where the learned ones start."""

from collections.abc import Mapping
from typing import Any

from reluformer.errors import UserError
from reluformer.ops.definition import Attention

_NEUTRAL = {"gain": 1.0, "gate": 0.0, "mix": 1.0}


def options_dict(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """A copy of the options of an attention; a `UserError` if they are not a mapping."""
    if not isinstance(options, Mapping | None):
        raise UserError(
            "attention_options must be a mapping of names to values, such as {'power': 2}, "
            f"got {options!r}"
        )
    return dict(options or {})


def initial_values(row: Attention, fixed: Mapping[str, Any]) -> dict[str, float]:
    """Initial value of every option that is learned and not fixed."""
    rule = row.rectified(fixed)
    values = {}
    for name, shape in row.learned.items():
        # The published `relu` has no threshold.
        is_paper_threshold = row.name == "relu" and name == "threshold"
        if shape == "token" or name in fixed or is_paper_threshold:
            continue
        if name in _NEUTRAL:
            values[name] = _NEUTRAL[name]
        else:
            values[name] = float(getattr(rule, name, row.defaults[name]))
    return values
