"""Conclusions of a study as plain data: tables, plots and a verdict for each claim."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["holds", "holds partly", "does not hold here", "not measured"]


@dataclass(frozen=True)
class Verdict:
    """Decision about one claim."""

    claim: str
    state: State
    number: str
    """The number that decides, with its unit."""
    rule: str
    """The rule that turns the number into the state."""


@dataclass(frozen=True)
class Table:
    """Rows of text under a heading; the first column names the row."""

    title: str
    columns: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Series:
    """One line of a plot; `errors` are standard deviations over seeds."""

    name: str
    xs: list[float]
    ys: list[float]
    errors: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Plot:
    """Lines over a common axis."""

    title: str
    x_label: str
    y_label: str
    series: list[Series]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Findings:
    """All conclusions of one study."""

    verdicts: list[Verdict]
    tables: list[Table]
    plots: list[Plot] = field(default_factory=list)


def decide(
    claim: str,
    value: float,
    *,
    holds: float,
    partly: float,
    unit: str,
    rule: str,
    signed: bool = True,
) -> Verdict:
    """A verdict on a value that should be large.

    Args:
        claim: The claim in words.
        value: The number that decides; NaN if it was not measured, infinite if it is a difference
            and one side diverged.
        holds: The claim holds from this value on.
        partly: The claim holds partly above this value.
        unit: Text behind the number.
        rule: The rule in words.
        signed: Show the sign of a positive number.
    """
    if math.isnan(value):
        return Verdict(claim, "not measured", "–", rule)
    state = _state(value, holds, partly)
    if math.isinf(value):
        return Verdict(claim, state, "one of the two diverged", rule)
    sign = "+" if signed else ""
    # Two decimals, or as many as it takes to see on which side of a limit the number is.
    shown = (f"{value:{sign}.{places}f}" for places in range(2, 18))
    number = next((s for s in shown if _state(float(s), holds, partly) == state), str(value))
    return Verdict(claim, state, f"{number} {unit}".strip(), rule)


def _state(value: float, holds: float, partly: float) -> State:
    if value >= holds:
        return "holds"
    return "holds partly" if value > partly else "does not hold here"


def show_number(value: float, form: str = "+.2f") -> str:
    """A number as text, also if it was not measured or one side of a difference diverged."""
    if math.isnan(value):
        return "–"
    return "diverged" if math.isinf(value) else f"{value:{form}}"


def combine(claim: str, parts: Sequence[bool | None], number: str, rule: str) -> Verdict:
    """A verdict from several conditions: all, some or none of them true; None was not measured."""
    known = [part for part in parts if part is not None]
    state: State = "holds partly"
    if not known or len(known) < len(parts):
        state = "not measured"
    elif all(known):
        state = "holds"
    elif not any(known):
        state = "does not hold here"
    return Verdict(claim, state, number if known else "–", rule)


@dataclass(frozen=True)
class Comparison:
    """Paired bootstrap of a group of cells against the baseline group, over shared test lines."""

    test: str
    """Name of the test set."""
    level: str
    """`sentence` or `document`: the segments that are resampled."""
    system: dict[str, Any]
    """Labels of the group."""
    baseline: dict[str, Any]
    seeds: int
    difference: float
    """Mean BLEU of the group minus that of the baseline."""
    interval: tuple[float, float]
    """95 % interval of the difference."""
    p_value: float
    signature: str


def find_comparison(
    comparisons: Sequence[Comparison], system: Mapping[str, Any], test: str, level: str
) -> Comparison | None:
    """The comparison whose labels are among these, if it was made."""
    for comparison in comparisons:
        if (comparison.test, comparison.level) == (test, level) and all(
            system.get(name) == value for name, value in comparison.system.items()
        ):
            return comparison
    return None
