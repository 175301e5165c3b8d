"""Counts the cells and seeds in results against what every study requires.

    python -m reluformer.study.coverage results/

Exits with status 1 if anything is missing.
"""

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from reluformer.console import guarded
from reluformer.study.budgets import BUDGETS
from reluformer.study.cells import Outcome
from reluformer.study.definition import Requirement, Study
from reluformer.study.record import find_records
from reluformer.study.registry import STUDIES


class Coverage(NamedTuple):
    """How much of a study's requirements the results have."""

    study: str
    required: int
    """Cells, every seed counted."""
    present: int
    missing: list[str]


def cover(study: Study, outcomes: Sequence[Outcome]) -> Coverage:
    """Compare outcomes with the requirements of a study; a diverged cell counts as a result."""
    required = present = 0
    missing = []
    for requirement in study.required:
        seeds = {o.labels.get("seed") for o in outcomes if _matches(o, requirement)}
        required += requirement.seeds
        present += min(len(seeds), requirement.seeds)
        if len(seeds) < requirement.seeds:
            labels = ", ".join(f"{name} {value}" for name, value in requirement.labels.items())
            missing.append(f"{labels}: {len(seeds)} of {requirement.seeds} seeds")
    return Coverage(study.name, required, present, missing)


def coverage(folders: Sequence[Path], budget: str = "full") -> list[Coverage]:
    """Coverage of every study by the records of one budget below some folders."""
    records = [record for _, record in find_records(folders) if record.budget == budget]
    return [
        cover(study, [o for r in records if r.study == study.name for o in r.outcomes])
        for study in STUDIES.values()
    ]


def _matches(outcome: Outcome, requirement: Requirement) -> bool:
    return all(outcome.labels.get(name) == value for name, value in requirement.labels.items())


@guarded
def main() -> None:
    """Print what is there and what is missing."""
    parser = ArgumentParser(
        prog="python -m reluformer.study.coverage",
        description="Counts cells and seeds against what the full budget requires.",
    )
    parser.add_argument("folders", nargs="*", type=Path, default=[Path("results")])
    parser.add_argument("--budget", choices=BUDGETS, default="full", help="count another budget")
    options = parser.parse_args()
    rows = coverage(options.folders, options.budget)
    for row in rows:
        print(f"{row.study}: {row.present} of {row.required} cells")
        for line in row.missing:
            print(f"    missing {line}")
    if any(row.missing for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
