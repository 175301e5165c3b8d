"""Runs on disk: checkpoints to resume from, and finished models.

    DIR/recipe.yaml, tokenizer.json, run.json, metrics.jsonl
    DIR/checkpoints/step-00001000/model.safetensors, optimizer.safetensors, [ema.safetensors]
    DIR/checkpoints/step-00001000/state.json
    DIR/model/model.safetensors, config.json, tokenizer.json, recipe.yaml

A checkpoint is written under a temporary name and renamed once all its files are on the disk.
`DIR/model` is the finished model. It is written last: a run with this folder is finished.
"""

import dataclasses
import os
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from reluformer.config.recipe import Recipe, load_stored_recipe
from reluformer.config.schema import build
from reluformer.data.tokenizer import Tokenizer
from reluformer.errors import UserError
from reluformer.files import PARTIAL, atomic_folder, remove_partials, write_json
from reluformer.model import ModelConfig, ReLUFormer
from reluformer.model.pretrained import CONFIG, StoredModel, model_of, read_model, read_pretrained
from reluformer.model.tensor_files import read_tensors, write_tensors
from reluformer.reading import read_json

CHECKPOINTS, MODEL = "checkpoints", "model"
RECIPE, TOKENIZER, STATE = "recipe.yaml", "tokenizer.json", "state.json"

FORMAT = 1

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class RunState:
    """State of a run besides its tensors. Random numbers are a function of seed and step."""

    step: int = 0
    """Number of steps done."""
    position: tuple[int, int] = (0, 0)
    """Epoch and batch to continue with."""
    tokens: int = 0
    """Number of target tokens trained on."""
    best_step: int | None = None
    """Step with the lowest dev loss."""
    best_nll: float | None = None
    """Lowest dev loss."""
    stale: int = 0
    """Number of validations since the lowest dev loss."""
    lowest: float | None = None
    """Lowest negative log-likelihood of a training interval."""
    stopped: bool = False
    """Whether early stopping has ended the run."""
    format: int = FORMAT


class Checkpoint(NamedTuple):
    """Contents of a checkpoint: state, and tensors by kind (`model`, `optimizer`, `ema`)."""

    state: RunState
    tensors: dict[str, Tensors]


class LoadedRun(NamedTuple):
    """A model with its tokenizer and recipe."""

    model: ReLUFormer
    """In evaluation mode."""
    tokenizer: Tokenizer
    recipe: Recipe
    step: int | None
    """Step of the checkpoint; None for a finished model."""


class StoredRun(NamedTuple):
    """The parameters of a model with its tokenizer and recipe."""

    model: StoredModel[ReLUFormer]
    tokenizer: Tokenizer
    recipe: Recipe


def folder_of(run: Path, step: int) -> Path:
    """Folder of the checkpoint after `step`."""
    return run / CHECKPOINTS / f"step-{step:08d}"


def steps(run: Path) -> list[int]:
    """Steps of the complete checkpoints, in order."""
    folders = (run / CHECKPOINTS).glob("step-*")
    matches = (re.fullmatch(r"step-(\d+)", folder.name) for folder in folders)
    return sorted(int(match[1]) for match in matches if match)


def save(run: Path, state: RunState, tensors: Mapping[str, Tensors]) -> Path:
    """Write a checkpoint atomically; return its folder."""
    folder = folder_of(run, state.step)
    with atomic_folder(folder) as partial:
        for kind, named in tensors.items():
            write_tensors(partial / f"{kind}.safetensors", named)
        write_json(partial / STATE, dataclasses.asdict(state))
    return folder


def load(run: Path, step: int, *required: str) -> Checkpoint:
    """Read the checkpoint after `step`; `required` are kinds of tensors that it must have."""
    folder = folder_of(run, step)
    kinds = {"model", "optimizer", *required} | {path.stem for path in folder.glob("*.safetensors")}
    tensors = {kind: read_tensors(folder / f"{kind}.safetensors") for kind in sorted(kinds)}
    return Checkpoint(_load_state(folder), tensors)


def load_weights(run: Path, step: int) -> Tensors:
    """Read the model's tensors of the checkpoint after `step`."""
    return read_tensors(folder_of(run, step) / "model.safetensors")


def prune(run: Path, keep: int, protected: Collection[int] = ()) -> None:
    """Delete all but the last `keep` checkpoints and the `protected` ones."""
    for step in steps(run)[:-keep]:
        if step not in protected:
            folder = folder_of(run, step)
            # If the process is killed meanwhile, `clean` removes a folder of this name.
            doomed = folder.with_name(folder.name + PARTIAL)
            os.replace(folder, doomed)
            shutil.rmtree(doomed)


def clean(run: Path) -> None:
    """Delete incomplete files and folders of a killed run."""
    remove_partials(run)
    remove_partials(run / CHECKPOINTS)


def finished_model(folder: Path) -> Path | None:
    """Folder of a run's finished model, which may be `folder` itself; None if there is none."""
    for finished in (folder, folder / MODEL):
        if (finished / CONFIG).is_file():
            return finished
    return None


def load_run(folder: Path | str) -> LoadedRun:
    """Load the finished model of a run, or else its newest checkpoint, in evaluation mode.

    Args:
        folder: Folder of a run, of a finished model or of one checkpoint.

    Raises:
        UserError: The folder holds no model, or its files are damaged.
    """
    place = _locate(Path(folder))
    if place.weights is None:
        model = ReLUFormer.from_pretrained(place.folder)
        tokenizer_and_recipe = _tokenizer_and_recipe(place.folder, model.config)
        return LoadedRun(model, *tokenizer_and_recipe, step=None)
    tokenizer, recipe = _tokenizer_and_recipe(place.folder)
    model = model_of(ReLUFormer, recipe.model_with(tokenizer.vocab_size), place.weights)
    return LoadedRun(model.eval(), tokenizer, recipe, place.step)


def read_run(folder: Path | str) -> StoredRun:
    """Read the parameters that `load_run` would load, without building the model."""
    place = _locate(Path(folder))
    if place.weights is None:
        stored = read_pretrained(ReLUFormer, place.folder)
        return StoredRun(stored, *_tokenizer_and_recipe(place.folder, stored.skeleton.config))
    tokenizer, recipe = _tokenizer_and_recipe(place.folder)
    config = recipe.model_with(tokenizer.vocab_size)
    return StoredRun(read_model(ReLUFormer, config, place.weights), tokenizer, recipe)


class _Place(NamedTuple):
    """Where the files of a model are."""

    folder: Path
    """Folder with the tokenizer and the recipe."""
    weights: Path | None
    """Weights of a checkpoint; None for a finished model."""
    step: int | None


def _locate(folder: Path) -> _Place:
    finished = finished_model(folder)
    if finished is not None:
        return _Place(finished, None, None)
    run, checkpoints = folder, steps(folder)
    if (folder / STATE).is_file():
        run, checkpoints = folder.parent.parent, [_load_state(folder).step]
    if not folder.exists():
        raise UserError(f"{folder}, the folder of a model or a run, does not exist")
    if not checkpoints:
        raise UserError(f"{folder} holds neither a finished model nor a checkpoint")
    step = checkpoints[-1]
    return _Place(run, folder_of(run, step) / "model.safetensors", step)


def _tokenizer_and_recipe(
    folder: Path, config: ModelConfig | None = None
) -> tuple[Tokenizer, Recipe]:
    """Tokenizer and recipe of a folder; the tokenizer must fit the model of `config`."""
    tokenizer = Tokenizer.load(folder / TOKENIZER)
    if config is not None and tokenizer.vocab_size != config.vocabulary:
        raise UserError(
            f"{folder / TOKENIZER} has {tokenizer.vocab_size} ids, but the model beside it has "
            f"{config.vocabulary}"
        )
    return tokenizer, load_stored_recipe(folder / RECIPE)


def _load_state(folder: Path) -> RunState:
    path = folder / STATE
    try:
        state = build(RunState, read_json(path))
    except UserError as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if state.format != FORMAT:
        raise UserError(f"{path} must be of format {FORMAT}, got format {state.format}")
    return state
