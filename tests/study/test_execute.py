"""The work of one cell in its own process."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reluformer.errors import Diverged
from reluformer.study import execute
from reluformer.study.budgets import BUDGETS
from reluformer.study.cells import Outcome, load_outcome
from reluformer.study.corpora import generate_corpora
from reluformer.study.definition import Plan
from reluformer.study.queue import JobQueue
from reluformer.study.registry import STUDIES
from reluformer.study.runner import RunOptions, run_studies


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
