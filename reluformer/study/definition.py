"""The definition of a study: its question, its cells for a budget, and its conclusions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from reluformer.study.budgets import Budget
from reluformer.study.cells import Cell, Outcome, Outcomes
from reluformer.study.findings import Comparison, Findings


@dataclass(frozen=True)
class Plan:
    """Input of a study's plan: the budget, and the outcomes of the cells that have ended."""

    budget: Budget
    outcomes: Outcomes = field(default_factory=dict)


@dataclass(frozen=True)
class Results:
    """Input of a study's conclusions: the outcomes of its own cells, and paired comparisons."""

    outcomes: Sequence[Outcome]
    comparisons: Sequence[Comparison] = ()


@dataclass(frozen=True)
class Contrast:
    """Which groups of cells are compared by paired bootstrap."""

    by: tuple[str, ...]
    """Labels that form a group; the seeds of a group are pooled."""
    baseline: dict[str, Any]
    """Labels of the baseline; other labels of `by` are those of the group."""
    select: Callable[[Sequence[Outcome]], Sequence[Outcome]] = list
    """Outcomes that take part."""


@dataclass(frozen=True)
class Requirement:
    """Some labels, and how many different seeds with them a complete result has."""

    labels: dict[str, Any]
    seeds: int = 1


@dataclass(frozen=True)
class Study:
    """A claim of the paper and the experiment that decides it."""

    name: str
    question: str
    """One line, shown by `reluformer study --list`."""
    paper: str
    """The paper's own numbers."""
    plan: Callable[[Plan], list[Cell]]
    """Cells for a budget. Called again as cells end, so that later cells may depend on earlier
    outcomes; a cell that was planned once is planned again."""
    conclude: Callable[[Results], Findings]
    contrast: Contrast | None = None
    required: tuple[Requirement, ...] = ()
    """Cells and seeds of a complete result under the full budget."""
    mapped: tuple[dict[str, Any], ...] = ()
    """Labels of the cells whose attention maps the report shows side by side."""
    notes: str = ""
    """Limits of the comparison, such as the corpus that stands in for the paper's."""
