"""The folder of a run: identity checks, description and lock."""

import datetime
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import reluformer
from reluformer.checkpoint import MODEL, RECIPE, TOKENIZER
from reluformer.config.recipe import Recipe, first_difference, load_stored_recipe
from reluformer.config.schema import build
from reluformer.errors import UserError
from reluformer.files import PARTIAL, real_path, write_json
from reluformer.info import commit
from reluformer.locks import lock_file
from reluformer.model.pretrained import CONFIG
from reluformer.processes import Processes
from reluformer.reading import JSON_LIMIT, read_json_object
from reluformer.train.data import TrainingData

RUN, METRICS, _LOCK = "run.json", "metrics.jsonl", ".lock"

_PACKAGES = ("torch", "numpy", "tokenizers", "safetensors")


def is_finished(run: Path) -> bool:
    """Whether the run has written its final model."""
    return (run / MODEL / CONFIG).is_file()


def check_recipe(run: Path, recipe: Recipe) -> None:
    """Raise UserError if `run` holds anything but a run of this recipe."""
    if run.exists() and not run.is_dir():
        raise UserError(f"{run} is not a folder")
    if (run / RECIPE).is_file():
        difference = first_difference(load_stored_recipe(run / RECIPE), recipe)
        if difference is not None:
            raise UserError(f"{run} holds a run of another recipe: {difference}")
    elif run.is_dir():
        for path in run.iterdir():
            if path.name != _LOCK and not path.name.endswith(PARTIAL):
                raise UserError(f"{run} holds {path.name} and is not a run; choose an empty folder")


def check_data(run: Path, data: TrainingData) -> None:
    """Raise UserError if the data differs from that of earlier starts of the run."""
    for name, checksum in _read_history(run).data.items():
        if data.checksums.get(name) != checksum:
            raise UserError(f"{run} was trained on other data: the checksum of {name} has changed")


def describe(run: Path, recipe: Recipe, data: TrainingData, group: Processes, step: int) -> None:
    """Write the resolved recipe, the tokenizer, and a description of this start.

    Args:
        run: Folder of the run.
        recipe: The recipe.
        data: Tokenizer, splits and checksums.
        group: The processes of this start.
        step: Step from which this start resumes.
    """
    recipe.save(run / RECIPE)
    data.tokenizer.save(run / TOKENIZER)
    description = {
        "recipe": recipe.hash,
        "data": data.checksums,
        "examples": data.describe(),
        "seed": recipe.train.seed,
        "starts": [*_read_history(run).starts, _start(group, step)],
    }
    write_json(run / RUN, description)


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Lock the folder against other training processes, until this process ends at the latest.

    Without effect on systems without file locks.
    """
    # The folder may be a link to one that does not exist yet.
    real_path(run).mkdir(parents=True, exist_ok=True)
    with lock_file(run / _LOCK, f"{run} is in use by another training process"):
        yield


@dataclass(frozen=True)
class _History:
    """The fields of a description that later starts of the run read."""

    data: dict[str, str] = field(default_factory=dict)
    starts: list[Any] = field(default_factory=list)


def _read_history(run: Path) -> _History:
    path = run / RUN
    described = read_json_object(path, JSON_LIMIT) if path.is_file() else {}
    known = {name: described[name] for name in ("data", "starts") if name in described}
    return build(_History, known, str(path))


def _start(group: Processes, step: int) -> dict[str, Any]:
    """Time, hardware and versions of this start."""
    cuda = group.device.type == "cuda"
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "step": step,
        "processes": group.world,
        "device": torch.cuda.get_device_name(group.device) if cuda else platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {"reluformer": reluformer.__version__, **_versions()},
        "commit": commit(),
    }


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
