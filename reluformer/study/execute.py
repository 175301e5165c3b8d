"""Work of one cell in its own process: `python -m reluformer.study.execute JOB.json`.

Writes `cell.json` into the cell's folder when the work has ended. Divergence is a result and exits
with status 0; every other error exits with another status and is tried again at the next call.
"""

import gc
import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from reluformer.checkpoint import RECIPE, load_run
from reluformer.config.migration import migrate
from reluformer.config.recipe import (
    Recipe,
    first_difference,
    load_recipe,
    load_stored_recipe,
)
from reluformer.console import guarded
from reluformer.errors import Diverged
from reluformer.files import remove_partials
from reluformer.info import commit, machine
from reluformer.inspection.measure import Inspection, inspect_model, rounded
from reluformer.inspection.texts import dev_batch
from reluformer.reading import LOG_LIMIT, parse_json, read_json_object, read_text
from reluformer.study import probes, theory
from reluformer.study.budgets import Budget, lookup_budget
from reluformer.study.cells import Cell, Outcome
from reluformer.study.corpora import fingerprint
from reluformer.study.finishing import finish_cell
from reluformer.study.queue import end_with_runner
from reluformer.study.tasks import TASKS, train_task
from reluformer.train import run_dir, train
from reluformer.train.data import load_data

_CURVE = ("step", "nll", "grad_norm", "tokens", "tokens_per_second", "attention", "dev", "rescaled")


class Job(NamedTuple):
    """One cell with everything its process needs."""

    cell: Cell
    root: Path
    """Folder that holds the folders of all cells."""
    budget: Budget
    corpus: Path | None
    """Prepared folder of the cell's corpus."""
    tests: tuple[str, ...]
    """Test sets to translate."""
    assignments: tuple[str, ...]
    """Further settings of all trainings, as `--set` takes them."""

    @property
    def folder(self) -> Path:
        """Folder of the cell."""
        return self.root / self.cell.name

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "cell": asdict(self.cell),
            "root": str(self.root),
            "budget": self.budget.name,
            "corpus": None if self.corpus is None else str(self.corpus),
            "tests": list(self.tests),
            "assignments": list(self.assignments),
        }

    @classmethod
    def load(cls, path: Path) -> "Job":
        """The job that was written as JSON."""
        values = read_json_object(path)
        return cls(
            Cell(**values["cell"]),
            Path(values["root"]),
            lookup_budget(values["budget"]),
            None if values["corpus"] is None else Path(values["corpus"]),
            tuple(values["tests"]),
            tuple(values["assignments"]),
        )


def execute(job: Job) -> Outcome:
    """Do a cell's work and write its outcome with the seconds of this process.

    The runner adds the seconds of earlier starts and the share of the device when all cells have
    ended. A runner that is killed before that leaves the seconds written here.
    """
    begin = time.monotonic()
    # Leftovers of a killed start.
    remove_partials(job.folder)
    work = {
        "train": _train,
        "theory": _theory,
        "family": _family,
        "extrapolation": _probe,
        "context": _probe,
    }[job.cell.work]
    try:
        values, detail = work(job)
        outcome = Outcome(job.cell.name, job.cell.labels, "finished", values, detail)
    except Diverged as error:
        outcome = Outcome(
            job.cell.name,
            job.cell.labels,
            "diverged",
            {},
            {**_described(job), "curve": _curve(job.folder)},
            reason=str(error),
        )
    outcome = replace(outcome, seconds=round(time.monotonic() - begin, 1))
    outcome.save(job.folder)
    return outcome


def recipe_of(job: Job) -> Recipe:
    """The recipe that a training cell describes."""
    return load_recipe(job.cell.recipe, _assignments(job))


def _assignments(job: Job) -> list[str]:
    settings = dict(job.cell.settings)
    if job.corpus is not None:
        settings["data.source"] = str(job.corpus)
    if job.cell.parent is not None:
        settings["train.start_from"] = str(job.root / job.cell.parent)
    return [*(f"{name}={json.dumps(value)}" for name, value in settings.items()), *job.assignments]


def _train(job: Job) -> tuple[dict[str, float], dict[str, Any]]:
    recipe = recipe_of(job)
    follow_move(job.folder, recipe)
    train(recipe, job.folder)
    _free_device_memory()
    curve = _curve(job.folder)
    detail = {**_described(job), "curve": curve}
    values = _training_values(curve)
    run = load_run(job.folder)._replace(recipe=recipe)
    values["parameters"] = sum(parameter.numel() for parameter in run.model.parameters())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch = {name: t.to(device) for name, t in dev_batch(run, job.budget.inspected).items()}
    inspection = inspect_model(run.model.to(device), batch)
    detail["inspection"] = inspection.to_dict()
    values |= inspection_values(inspection)
    corpus, tests = _test_sets(job, recipe)
    if tests:
        documents = recipe.data.unit == "document"
        finished = finish_cell(job.folder, corpus, tests, job.budget.decoding, documents=documents)
        detail |= finished
        values |= score_values(finished["scores"])
    return values, detail


def follow_move(run: Path, recipe: Recipe) -> None:
    """Let a run go on whose corpus, or the run it started from, is in another folder than before.

    Raises:
        UserError: The corpus is another one.
    """
    path = run / RECIPE
    if not path.is_file():
        return
    stored = load_stored_recipe(path)
    moved = replace(
        stored,
        data=replace(stored.data, source=recipe.data.source),
        train=replace(stored.train, start_from=recipe.train.start_from),
    )
    if moved != stored and first_difference(moved, recipe) is None:
        run_dir.check_data(run, load_data(recipe))
        moved.save(path)


def _free_device_memory() -> None:
    """Return the memory of the training, so that cells beside this one can use it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _test_sets(job: Job, recipe: Recipe) -> tuple[Path, tuple[str, ...]]:
    """The corpus and the test sets to translate: the job's, or those of the recipe's data."""
    if job.corpus is not None:
        return job.corpus, job.tests
    corpus = Path(recipe.data.source)
    tests = (test for test in ("test", "test.long") if (corpus / f"{test}.source.txt").is_file())
    return corpus, tuple(tests)


def _training_values(curve: list[dict[str, Any]]) -> dict[str, float]:
    """Losses, speed and attention statistics at the end of a curve."""
    steps = [point for point in curve if "nll" in point]
    last = steps[-1]
    values = {"train_nll": last["nll"], "tokens": last["tokens"], "steps": last["step"]}
    values["tokens_per_second"] = median(point["tokens_per_second"] for point in steps)
    dev = [point["dev"]["nll"] for point in steps if "nll" in point.get("dev", {})]
    if dev:
        values["dev_nll"] = dev[-1]
    for point in curve:
        if "rescaled" in point:
            values["dev_nll"] = point["rescaled"]["after"]
            values["score_factor"] = point["rescaled"]["factor"]
    for site, statistics in last["attention"].items():
        values |= {f"{name}_{site}": value for name, value in statistics.items()}
    return values


def inspection_values(result: Inspection) -> dict[str, float]:
    """Means over layers of the measures that tables use; the top share is that of the top 0.2 %."""
    at = result.percents.index(0.2)
    memory = [branch.ratio for branch in result.branches if branch.name.endswith("memory")]
    values = {"memory_ratio": _mean(memory)}
    values["memory_top"] = _mean([m.top_share[at] for m in result.memories])
    values["memory_anisotropy"] = _mean([m.anisotropy for m in result.memories])
    values["memory_dead_slots"] = _mean([m.dead_slots for m in result.memories])
    for site in ("encoder", "decoder", "cross"):
        chosen = [a for a in result.attentions if a.site == site]
        values[f"top_{site}"] = _mean([a.top_share[at] for a in chosen])
        values[f"anisotropy_{site}"] = _mean([a.mean("anisotropy") for a in chosen])
    return values


def score_values(scores: dict[str, dict[str, Any]]) -> dict[str, float]:
    """BLEU, chrF2 and d-BLEU by test set: `bleu` of `test`, `bleu_long` of `test.long`."""
    values = {}
    for test, metrics in scores.items():
        suffix = "" if test == "test" else "_" + test.removeprefix("test.")
        for name, key in (("BLEU", "bleu"), ("chrF2", "chrf"), ("d-BLEU", "dbleu")):
            if name in metrics:
                values[f"{key}{suffix}"] = metrics[name]["value"]
    return values


def _theory(job: Job) -> tuple[dict[str, float], dict[str, Any]]:
    samples = theory.sample_quantities(job.budget.theory_numbers, seed=job.cell.labels["seed"])
    rows = [sample._asdict() for sample in samples]
    return {}, {**_described(job), "samples": rows}


def _family(job: Job) -> tuple[dict[str, float], dict[str, Any]]:
    size, seed = job.budget.family, int(job.cell.labels["seed"])
    torch.set_num_threads(1)
    values = {
        task: train_task(
            job.cell.options["kind"], task, steps=size.steps, width=size.width,
            length=size.length, seed=seed,
        )
        for task in TASKS
    }  # fmt: skip
    return values, _described(job)


def _probe(job: Job) -> tuple[dict[str, float], dict[str, Any]]:
    assert job.corpus is not None and job.cell.parent is not None
    probe = probes.Probe(
        job.root / job.cell.parent, job.corpus, job.folder, job.tests, job.budget.decoding
    )
    if job.cell.work == "extrapolation":
        values, detail = probes.extrapolate(probe, int(job.cell.options["length"]))
    else:
        values, detail = probes.use_of_context(probe)
    return values, {**_described(job), **detail}


def _described(job: Job) -> dict[str, Any]:
    """Settings, versions, hardware and commit."""
    return {
        "recipe": job.cell.recipe,
        "settings": dict(job.cell.settings),
        "assignments": list(job.assignments),
        "parent": job.cell.parent,
        "corpus": job.cell.corpus,
        "data": None if job.corpus is None else fingerprint(job.corpus),
        "budget": job.budget.name,
        "commit": commit(),
        "machine": machine(),
    }


def _curve(run: Path) -> list[dict[str, Any]]:
    """Logged points of a run with the fields that reports use."""
    path = run / run_dir.METRICS
    lines = read_text(path, LOG_LIMIT).splitlines() if path.is_file() else []
    points = (migrate(parse_json(line, path)) for line in lines)
    return [rounded({key: p[key] for key in _CURVE if key in p}) for p in points]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


@guarded
def main() -> None:
    """Execute the job whose file is the only argument."""
    end_with_runner()
    execute(Job.load(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
