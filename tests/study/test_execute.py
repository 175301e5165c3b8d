"""The work of one cell in its own process."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reluformer.config.recipe import Recipe
from reluformer.errors import Diverged, UserError
from reluformer.study import execute
from reluformer.study.budgets import BUDGETS
from reluformer.study.cells import Outcome, load_outcome
from reluformer.study.corpora import generate_corpora
from reluformer.study.definition import Plan
from reluformer.study.queue import JobQueue
from reluformer.study.registry import STUDIES
from reluformer.study.runner import RunOptions, run_studies
from reluformer.study.variants import sentence_cell
from reluformer.train import train
from reluformer.train.run_dir import check_recipe


def family_job(root: Path) -> execute.Job:
    """The first cell of the study `family`."""
    (cell, *_) = STUDIES["family"].plan(Plan(BUDGETS["tiny"], {}))
    return execute.Job(cell, root, BUDGETS["tiny"], None, (), ())


@pytest.mark.parametrize("diverges", [False, True])
def test_a_cell_measures_its_own_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, diverges: bool
) -> None:
    def train_task(*_: Any, **__: Any) -> float:
        time.sleep(0.06)
        if diverges:
            raise Diverged(3, "loss is NaN", {})
        return 1.0

    monkeypatch.setattr(execute, "train_task", train_task)
    job = family_job(tmp_path)
    job.folder.mkdir()
    outcome = execute.execute(job)
    # Six tasks, or the first of them.
    assert outcome.seconds >= (0.1 if diverges else 0.36)
    assert load_outcome(job.folder) == outcome


def test_files_that_a_killed_start_left_half_written_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execute, "train_task", lambda *_, **__: 1.0)
    job = family_job(tmp_path)
    job.folder.mkdir()
    (job.folder / "cell.json.123.0.partial").touch()
    execute.execute(job)
    assert [file.name for file in job.folder.iterdir()] == ["cell.json"]
    texts = tmp_path / "europarl-sent.text"
    texts.mkdir()
    (texts / "train.en.123.0.partial").touch()
    generate_corpora({"europarl-sent": tmp_path / "europarl-sent"})
    assert not list(texts.glob("*.partial"))


def test_an_interrupted_runner_keeps_the_time_of_ended_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(queue: JobQueue, ready: Callable[[], dict[str, list[str]]]) -> list[str]:
        name = next(iter(ready()))
        (tmp_path / "tiny" / name).mkdir()
        Outcome(name, {}, "finished", {}).save(tmp_path / "tiny" / name)
        queue.logs.mkdir()
        queue._count({name: None, "other": None}, 8.0)  # type: ignore[dict-item]
        raise KeyboardInterrupt

    monkeypatch.setattr(JobQueue, "run", interrupted)
    monkeypatch.setattr("reluformer.study.runner.start_mps", lambda: None)
    with pytest.raises(KeyboardInterrupt):
        run_studies(
            [STUDIES["family"]], RunOptions(tmp_path, BUDGETS["tiny"], report=lambda _: None)
        )
    (folder,) = (tmp_path / "tiny").glob("family.*")
    outcome = load_outcome(folder)
    assert outcome is not None and (outcome.seconds, outcome.device_seconds) == (8.0, 4.0)


def test_a_run_goes_on_with_a_corpus_that_has_moved(tmp_path: Path) -> None:
    cell = sentence_cell(BUDGETS["tiny"])
    there, here = (tmp_path / name / "europarl-sent" for name in ("there", "here"))
    generate_corpora({"europarl-sent": there})

    def recipe(corpus: Path) -> Recipe:
        small = ("train.steps=1", "train.dev_every=1", "train.log_every=1")
        return execute.recipe_of(execute.Job(cell, tmp_path, BUDGETS["tiny"], corpus, (), small))

    run = tmp_path / cell.name
    execute.follow_move(run, recipe(there))
    train(recipe(there), run, quiet=True)
    there.parent.rename(here.parent)
    execute.follow_move(run, recipe(here))
    check_recipe(run, recipe(here))
    description = (run / "run.json").read_text()
    there.parent.symlink_to(here.parent)
    (run / "run.json").write_text(description.replace('"dev": "', '"dev": "0'))
    with pytest.raises(UserError, match="other data: the checksum of dev"):
        execute.follow_move(run, recipe(there))
