"""The table of feed-forward memories, from the table of the library."""

import dataclasses

from reluformer.model.memory import MEMORIES


def markdown() -> str:
    """One row for each kind of memory."""
    lines = ["| `model.memory` | output | options | paper |", "|---|---|---|---|"]
    for row in MEMORIES.values():
        options = ", ".join(f"`{field.name}`" for field in dataclasses.fields(row.selector))
        formula = row.formula.replace("|", "\\|")
        lines.append(f"| `{row.name}` | {formula} | {options} | {row.paper} |")
    return "\n".join(lines)
