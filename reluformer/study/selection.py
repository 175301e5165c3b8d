"""Cells to run: those that the user selects, and models that later cells need again."""

import fnmatch
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from reluformer.checkpoint import finished_model
from reluformer.errors import UserError
from reluformer.study.cells import Cell, Outcome, Outcomes


def select(cells: Sequence[Cell], patterns: Sequence[str]) -> list[Cell]:
    """Cells whose names match a pattern, in the order of the patterns; without patterns, all.

    A cell comes after the one it starts from, which need not match.

    Raises:
        UserError: No cell matches a pattern.
    """
    if not patterns:
        return list(cells)
    by_name = {cell.name: cell for cell in cells}
    chosen: dict[str, Cell] = {}

    def choose(cell: Cell) -> None:
        if cell.parent is not None:
            choose(by_name[cell.parent])
        chosen.setdefault(cell.name, cell)

    for pattern in patterns:
        names = fnmatch.filter(by_name, pattern)
        if not names:
            raise UserError(f"only must match a cell, such as {cells[0].name}, got {pattern!r}")
        for name in names:
            choose(by_name[name])
    return list(chosen.values())


def lost_models(cells: Sequence[Cell], outcomes: Outcomes, root: Path) -> list[str]:
    """Names of finished models that cells start from and whose weights are gone.

    Args:
        cells: The planned cells.
        outcomes: Results by cell name.
        root: Folder of the cells.
    """
    by_name = {cell.name: cell for cell in cells}
    left = [cell for cell in cells if cell.name not in outcomes]
    lost: dict[str, None] = {}
    while left:
        parent = left.pop().parent
        if parent is None or parent in lost or parent not in outcomes:
            continue
        if outcomes[parent].finished and finished_model(root / parent) is None:
            lost[parent] = None
            left.append(by_name[parent])
    return list(lost)


def set_aside(
    cells: Sequence[Cell],
    outcomes: dict[str, Outcome],
    root: Path,
    report: Callable[[str], None],
) -> None:
    """Plan lost models again.

    Results are often kept without weights. The earlier result moves to the folder `earlier`.

    Args:
        cells: The planned cells.
        outcomes: Results by cell name, from which those of such models are removed.
        root: Folder of the cells.
        report: Shows a line for each such model.
    """
    for name in lost_models(cells, outcomes, root):
        place = root / "earlier" / name
        shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(exist_ok=True)
        (root / name).rename(place)
        del outcomes[name]
        report(f"{name}: trained again, its weights are not in {root / name}")
