"""Runs studies: plans cells, executes the ones that are left, compares, concludes.

Layout of the output folder, with one folder a cell that all studies share:

    OUT/BUDGET/CELL/            run folder with cell.json
    OUT/BUDGET/logs/CELL.log
    OUT/BUDGET/NAME.study.json  all outcomes and comparisons of the study NAME
"""

import datetime
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from reluformer.config.recipe import Recipe
from reluformer.files import check_folder, real_path, write_json
from reluformer.info import commit
from reluformer.locks import lock_file
from reluformer.study.budgets import Budget
from reluformer.study.cells import Cell, Outcome, Outcomes
from reluformer.study.clocks import add_clocks
from reluformer.study.corpora import (
    TESTS,
    check_corpora,
    check_sources,
    find_corpora,
    generate_corpora,
    vocabulary_size,
)
from reluformer.study.definition import Plan, Results, Study
from reluformer.study.estimate import estimate
from reluformer.study.execute import Job, recipe_of
from reluformer.study.findings import Comparison
from reluformer.study.maps import study_maps
from reluformer.study.queue import JobQueue, start_mps
from reluformer.study.record import MAPS_SUFFIX, SUFFIX, StudyRecord, machine_of
from reluformer.study.selection import lost_models, select, set_aside
from reluformer.study.significance import compare_cells
from reluformer.study.stored import check_data, check_outcomes, load_outcomes

# Minutes after which a study on a CPU deserves a warning.
_PATIENCE = 120.0


@dataclass(frozen=True)
class RunOptions:
    """Options of `reluformer study`."""

    out: Path
    budget: Budget
    jobs: int = 1
    minutes: float | None = None
    """Time after which running cells are cut; None for no limit."""
    data: Sequence[str] = ()
    """Folders of prepared corpora: FOLDER or NAME=FOLDER."""
    assignments: Sequence[str] = ()
    """Further settings of all trainings."""
    only: Sequence[str] = ()
    """Patterns of names of cells to run, in this order, as in a shell; empty for all."""
    report: Callable[[str], None] = partial(print, flush=True)
    """Shows a line at once; a study takes hours, and its output may be a file."""

    @property
    def root(self) -> Path:
        """Folder of the cells."""
        return real_path(self.out / self.budget.name)

    @property
    def is_generated(self) -> bool:
        """Whether generated text takes the place of all corpora."""
        return self.budget.name == "tiny" and not self.data


@dataclass
class _Run:
    studies: Sequence[Study]
    options: RunOptions
    queue: JobQueue
    corpora: dict[str, Path] = field(default_factory=dict)

    def outcomes(self) -> dict[str, Outcome]:
        """Outcomes of all cells in the folder."""
        return {outcome.name: outcome for outcome in load_outcomes(self.options.root)}

    def cells(self, outcomes: Outcomes) -> list[Cell]:
        """The selected cells of all studies as planned now, each once."""
        options = self.options
        plan = Plan(options.budget, outcomes)
        cells = {cell.name: cell for study in self.studies for cell in study.plan(plan)}
        check_outcomes(
            list(cells.values()), outcomes, options.root, options.budget, options.assignments
        )
        return select(list(cells.values()), options.only)

    def job(self, cell: Cell) -> Job:
        """The cell with the folders it needs."""
        corpus = None if cell.corpus is None else self.corpora[cell.corpus]
        tests = TESTS.get(cell.corpus or "", ())
        if cell.work == "train" and cell.labels.get("length") == 0:
            tests = ()
        root, budget = self.options.root, self.options.budget
        return Job(cell, root, budget, corpus, tests, tuple(self.options.assignments))

    def ready(self) -> dict[str, list[str]]:
        """Commands of the cells that can run now."""
        add_clocks(self.queue, self.options.root)
        outcomes = self.outcomes()
        cells = self.cells(outcomes)
        set_aside(cells, outcomes, self.options.root, self.options.report)
        left = [cell for cell in cells if cell.name not in outcomes]
        return {cell.name: _command(self, cell) for cell in _ready(self, left, outcomes)}


def run_studies(studies: Sequence[Study], options: RunOptions) -> list[StudyRecord]:
    """Run or resume studies side by side; return their records, which are also written as JSON.

    Cells that have ended are not run again. Cells that fail are reported and tried again at the
    next call. Cells that the clock cuts go on at the next call.

    Raises:
        UserError: A setting cannot work, a result has other settings, or a corpus is not prepared.
            Nothing has been written. Or another process runs studies in the folder.
    """
    check_folder(options.root)
    end = time.monotonic() + 60 * (options.minutes if options.minutes is not None else 1e6)
    queue = JobQueue(options.jobs, end, options.root / "logs", options.report)
    run = _Run(studies, options, queue)
    outcomes = run.outcomes()
    cells = run.cells(outcomes)
    names = list(dict.fromkeys(cell.corpus for cell in cells if cell.corpus is not None))
    run.corpora = (
        {name: options.root / "data" / name for name in names}
        if options.is_generated
        else find_corpora(names, options.data)
    )
    left = _announce(run, cells, outcomes)
    if not options.is_generated:
        check_corpora(run.corpora)
    check_sources([recipe for cell, recipe in left if cell.corpus is None and recipe is not None])
    options.root.mkdir(parents=True, exist_ok=True)
    message = f"{options.root} is in use by another study; one call can run several studies"
    with lock_file(options.root / ".lock", message, remove=True):
        if options.is_generated:
            generate_corpora(run.corpora)
        check_data(outcomes, options.root, run.corpora)
        if options.jobs > 1 and torch.cuda.is_available():
            start_mps()
        try:
            ran = queue.run(run.ready)
        finally:
            add_clocks(queue, options.root)
        return [_finish(run, study, ran) for study in studies]


def _finish(run: _Run, study: Study, ran: Sequence[str]) -> StudyRecord:
    """Write the record of a study, and the attention maps that it shows.

    A call that ran no cell of the study keeps the origin of its numbers.
    """
    root = run.options.root
    path = root / f"{study.name}{SUFFIX}"
    record = _conclude(run, study)
    if path.is_file() and not set(ran) & set(record.planned):
        record = record.with_origin(StudyRecord.load(path))
    record.save(path)
    maps = study_maps(study, record.outcomes, root, run.corpora) if study.mapped else []
    if maps:
        write_json(root / f"{study.name}{MAPS_SUFFIX}", maps)
    return record


def _announce(
    run: _Run, cells: Sequence[Cell], outcomes: dict[str, Outcome]
) -> list[tuple[Cell, Recipe | None]]:
    """Say what the study needs; return the cells that are left, with the recipes of trainings.

    Settings that cannot work are refused here.
    """
    lost = lost_models(cells, outcomes, run.options.root)
    left = [cell for cell in cells if cell.name not in outcomes or cell.name in lost]
    with_recipes = [(c, recipe_of(run.job(c)) if c.work == "train" else None) for c in left]
    done = [outcomes[cell.name] for cell in cells if cell.name in outcomes]
    vocabulary = partial(vocabulary_size, is_generated=run.options.is_generated)
    needs = estimate(with_recipes, done, run.options.jobs, vocabulary)
    say = run.options.report
    for study in run.studies:
        say(f"study {study.name}, budget {run.options.budget.name}: {study.question}")
    say(f"{len(cells) - len(left)} of {len(cells)} cells have ended; {needs}")
    if lost:
        say(f"to train again, because later cells need their weights: {', '.join(lost)}")
    if not torch.cuda.is_available() and needs.minutes > _PATIENCE:
        say("warning: there is no GPU here; short and full are for GPUs, --budget tiny is for CPUs")
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory / 1e9
        if needs.gigabytes > memory:
            say(f"warning: the GPU has {memory:.0f} GB; use fewer --jobs or --budget short")
    return with_recipes


def _ready(run: _Run, left: Sequence[Cell], outcomes: dict[str, Outcome]) -> list[Cell]:
    """Cells whose parent has finished and that have not failed in this call."""
    ready = []
    for cell in left:
        if cell.name in run.queue.failed:
            continue
        if cell.parent is None:
            ready.append(cell)
        elif cell.parent in outcomes:
            parent = outcomes[cell.parent]
            if parent.finished:
                ready.append(cell)
            else:
                folder = run.options.root / cell.name
                folder.mkdir(parents=True, exist_ok=True)
                reason = f"its start {cell.parent} diverged"
                Outcome(cell.name, cell.labels, "diverged", {}, reason=reason).save(folder)
    return ready


def _command(run: _Run, cell: Cell) -> list[str]:
    path = run.options.root / "jobs" / f"{cell.name}.json"
    write_json(path, run.job(cell).to_dict())
    return [sys.executable, "-m", "reluformer.study.execute", str(path)]


def _conclude(run: _Run, study: Study) -> StudyRecord:
    outcomes = run.outcomes()
    planned = [cell.name for cell in study.plan(Plan(run.options.budget, outcomes))]
    ended = [outcomes[name] for name in planned if name in outcomes]
    comparisons: list[Comparison] = []
    if study.contrast is not None:
        comparisons = compare_cells(
            study.contrast, ended, run.options.root, run.options.budget.bootstrap
        )
    return StudyRecord(
        study=study.name,
        budget=run.options.budget.name,
        date=datetime.date.today().isoformat(),
        command=shlex.join(["reluformer", *sys.argv[1:]]),
        commit=commit(),
        machine=machine_of(ended),
        folder=os.path.relpath(run.options.root),
        planned=planned,
        failed={name: why for name, why in run.queue.failed.items() if name in planned},
        outcomes=ended,
        comparisons=comparisons,
        tables=study.conclude(Results(ended, comparisons)).tables,
    )
