"""Results in the folder of a study, checked against the plan before their numbers are used."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from reluformer.errors import UserError, shorten
from reluformer.study.budgets import Budget
from reluformer.study.cells import OUTCOME, Cell, Outcome, Outcomes, load_outcome
from reluformer.study.corpora import fingerprint


def load_outcomes(root: Path) -> list[Outcome]:
    """Outcomes of all cells in a folder.

    Raises:
        UserError: A file is damaged, or belongs to another cell than its folder.
    """
    folders = sorted(root.iterdir()) if root.is_dir() else []
    outcomes = []
    for folder in folders:
        outcome = load_outcome(folder) if folder.is_dir() else None
        if outcome is None:
            continue
        if outcome.name != folder.name:
            raise UserError(f"{folder / OUTCOME} is the result of {shorten(outcome.name)}")
        outcomes.append(outcome)
    return outcomes


def check_outcomes(
    cells: Sequence[Cell],
    outcomes: Outcomes,
    root: Path,
    budget: Budget,
    assignments: Sequence[str],
) -> None:
    """Raise UserError if a result was made with other settings than those planned now.

    Args:
        cells: The planned cells.
        outcomes: Results by cell name.
        root: Folder of the cells.
        budget: The budget of the plan.
        assignments: Further settings of all trainings.
    """
    for cell in cells:
        if cell.name not in outcomes:
            continue
        for name, there, here in _compared(cell, outcomes, budget, assignments):
            if there != here:
                raise UserError(
                    f"{root / cell.name} holds a result of other settings: {name} is "
                    f"{shorten(there)} there and {shorten(here)} here; choose another --out, or "
                    "delete the folder to run the cell again"
                )


def check_data(outcomes: Outcomes, root: Path, corpora: Mapping[str, Path]) -> None:
    """Raise UserError if a result was made with another corpus than the one in use.

    Args:
        outcomes: Results by cell name. Those of earlier versions do not name their data.
        root: Folder of the cells.
        corpora: Prepared folders by corpus name.
    """
    used = {name: fingerprint(folder) for name, folder in corpora.items()}
    for outcome in outcomes.values():
        name, data = outcome.detail.get("corpus"), outcome.detail.get("data")
        if name in used and data not in (None, used[name]):
            raise UserError(
                f"{root / outcome.name} holds a result of other data than {corpora[name]}; choose "
                "another --out, or delete the folder to run the cell again"
            )


def _compared(
    cell: Cell, outcomes: Outcomes, budget: Budget, assignments: Sequence[str]
) -> Iterator[tuple[str, Any, Any]]:
    """Names of settings, their values in the result, and their values in the plan."""
    outcome = outcomes[cell.name]
    yield "labels", outcome.labels, cell.labels
    detail = outcome.detail
    if not outcome.finished and not detail:
        # It was not run, because its start had diverged, and has no settings of its own.
        start = outcomes.get(cell.parent or "")
        yield "the cell it starts from", "diverged", "not run" if start is None else start.status
        return
    yield "budget", detail.get("budget"), budget.name
    yield "recipe", detail.get("recipe"), cell.recipe
    yield "corpus", detail.get("corpus"), cell.corpus
    there = detail.get("settings", {})
    for name in [*cell.settings, *there]:
        yield name, there.get(name), cell.settings.get(name)
    # Results of earlier versions do not say.
    if cell.work == "train" and "assignments" in detail:
        yield "--set", *_differing(detail["assignments"], list(assignments))


def _differing(there: list[str], here: list[str]) -> tuple[list[str], list[str]]:
    """Items that only one of two lists has; the lists themselves if they differ in order."""
    only = [a for a in there if a not in here], [a for a in here if a not in there]
    return only if any(only) else (there, here)
