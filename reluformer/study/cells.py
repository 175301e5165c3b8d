"""Cells and their outcomes: one training, probe or computation of a study, in one folder."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal

from reluformer.config.schema import build
from reluformer.errors import UserError
from reluformer.files import write_json
from reluformer.reading import JSON_LIMIT, read_json

Work = Literal["train", "theory", "family", "extrapolation", "context"]
Status = Literal["finished", "diverged"]

OUTCOME = "cell.json"


@dataclass(frozen=True)
class Cell:
    """One unit of work. Cells of different studies with one name are the same cell."""

    name: str
    """Name of the cell's folder."""
    labels: dict[str, Any]
    """Values that tables group by, such as attention, memory, slots, length and seed."""
    work: Work = "train"
    recipe: str = ""
    """Shipped recipe or YAML file of a training."""
    corpus: str | None = None
    """Name of the corpus; the runner maps it to a prepared folder."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Overrides of the recipe, by dotted name."""
    parent: str | None = None
    """Cell whose finished model this one starts from or measures."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keywords of the work other than training."""


@dataclass(frozen=True)
class Outcome:
    """Result of a cell that ended, well or by divergence."""

    name: str
    labels: dict[str, Any]
    status: Status
    values: dict[str, float]
    """Numbers that tables and verdicts use, such as `bleu` and `dev_nll`."""
    detail: dict[str, Any] = field(default_factory=dict)
    """Everything else: settings, curve, signatures, inspection, versions, commit."""
    reason: str = ""
    """Why the cell diverged."""
    seconds: float = 0.0
    """Wall-clock time of the cell."""
    device_seconds: float = 0.0
    """Seconds divided among the cells that shared the device; 0 if the runner was killed."""

    @property
    def finished(self) -> bool:
        """Whether the cell ended without divergence."""
        return self.status == "finished"

    def value(self, name: str) -> float:
        """A number of the outcome; NaN if it was not measured."""
        return float(self.values.get(name, math.nan))

    def save(self, folder: Path) -> None:
        """Write `cell.json` into the cell's folder."""
        write_json(folder / OUTCOME, asdict(self))


Outcomes = Mapping[str, Outcome]
"""Outcomes by cell name."""


def load_outcome(folder: Path) -> Outcome | None:
    """The outcome in a cell's folder; None while the cell has not ended."""
    path = folder / OUTCOME
    if not path.is_file():
        return None
    try:
        return outcome_from(read_json(path, JSON_LIMIT))
    except UserError as error:
        raise UserError(f"{path} is damaged: {error}") from None


def outcome_from(values: Any) -> Outcome:
    """An outcome from the plain values that `asdict` gave.

    Raises:
        UserError: A field is unknown, missing or of another type.
    """
    return build(Outcome, values)


@dataclass(frozen=True)
class Summary:
    """Mean and spread of one value over the seeds of a group."""

    mean: float
    spread: float
    """Standard deviation over seeds; 0 for one seed."""
    seeds: int


def summarise(outcomes: Iterable[Outcome], name: str) -> Summary:
    """Mean and spread of a value over the finished outcomes that have it."""
    values = [o.value(name) for o in outcomes if o.finished and math.isfinite(o.value(name))]
    if not values:
        return Summary(math.nan, 0.0, 0)
    return Summary(mean(values), stdev(values) if len(values) > 1 else 0.0, len(values))


def group(outcomes: Iterable[Outcome], *by: str) -> dict[tuple[Any, ...], list[Outcome]]:
    """Outcomes by the values of some labels, in order of first appearance."""
    groups: dict[tuple[Any, ...], list[Outcome]] = {}
    for outcome in outcomes:
        key = tuple(outcome.labels.get(name) for name in by)
        groups.setdefault(key, []).append(outcome)
    return groups
