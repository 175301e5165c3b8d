"""Runs on disk: checkpoints to continue from, and models to translate with.

    DIR/recipe.yaml, tokenizer.json, run.json, metrics.jsonl
    DIR/checkpoints/step-00001000/model.safetensors, optimizer.safetensors, [ema.safetensors]
    DIR/checkpoints/step-00001000/state.json
    DIR/model/model.safetensors, config.json, tokenizer.json, recipe.yaml

A checkpoint is filled under another name and gets its own by one rename, when all its files have
reached the disk. `DIR/model` is the finished model, written last: where it exists, the run is done.
"""

import dataclasses
import json
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
from reluformer.model import ReLUFormer
from reluformer.model.pretrained import CONFIG, load_tensors, read_tensors, write_tensors

CHECKPOINTS, MODEL = "checkpoints", "model"
RECIPE, TOKENIZER, STATE = "recipe.yaml", "tokenizer.json", "state.json"

FORMAT = 1

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class RunState:
    """Where a run stands, besides its tensors. Random numbers are a function of seed and step."""

    step: int = 0
    position: tuple[int, ...] = (0, 0)
    """Epoch and batch to go on with."""
    tokens: int = 0
    """Target tokens seen."""
    best_step: int | None = None
    best_nll: float | None = None
    stale: int = 0
    """Measurements of the dev loss since the best."""
    lowest: float | None = None
    """Lowest training loss of an interval."""
    stopped: bool = False
    """Ended before its last step, for want of progress."""
    format: int = FORMAT


class Checkpoint(NamedTuple):
    """All that `save` wrote: the state, and tensors by kind (`model`, `optimizer`, `ema`)."""

    state: RunState
    tensors: dict[str, Tensors]


class LoadedRun(NamedTuple):
    """A model to translate with."""

    model: ReLUFormer
    """In evaluation mode."""
    tokenizer: Tokenizer
    recipe: Recipe
    step: int | None
    """Step of the checkpoint; None for a finished model."""


def folder_of(run: Path, step: int) -> Path:
    """Folder of the checkpoint after `step`."""
    return run / CHECKPOINTS / f"step-{step:08d}"


def steps(run: Path) -> list[int]:
    """Steps of the complete checkpoints, in order."""
    found = (re.fullmatch(r"step-(\d+)", path.name) for path in (run / CHECKPOINTS).glob("step-*"))
    return sorted(int(match[1]) for match in found if match)


def save(run: Path, state: RunState, tensors: Mapping[str, Tensors]) -> Path:
    """Write a checkpoint; it appears whole or not at all."""
    folder = folder_of(run, state.step)
    with atomic_folder(folder) as partial:
        for kind, named in tensors.items():
            write_tensors(partial / f"{kind}.safetensors", named)
        write_json(partial / STATE, dataclasses.asdict(state))
    return folder


def load(run: Path, step: int) -> Checkpoint:
    """Read the checkpoint after `step`."""
    folder = folder_of(run, step)
    kinds = {"model", "optimizer"} | {path.stem for path in folder.glob("*.safetensors")}
    tensors = {kind: read_tensors(folder / f"{kind}.safetensors") for kind in sorted(kinds)}
    return Checkpoint(_state(folder), tensors)


def load_weights(run: Path, step: int) -> Tensors:
    """Read the model's tensors of the checkpoint after `step`."""
    return read_tensors(folder_of(run, step) / "model.safetensors")


def prune(run: Path, keep: int, protected: Collection[int] = ()) -> None:
    """Delete all but the last `keep` checkpoints and the `protected` ones."""
    for step in steps(run)[:-keep]:
        if step not in protected:
            folder = folder_of(run, step)
            # Under this name, what a killed process leaves of it counts as litter.
            doomed = folder.with_name(folder.name + PARTIAL)
            os.replace(folder, doomed)
            shutil.rmtree(doomed)


def clean(run: Path) -> None:
    """Delete what a killed run left unfinished."""
    remove_partials(run)
    remove_partials(run / CHECKPOINTS)


def finished_model(folder: Path) -> Path | None:
    """Where a run's finished model lies: in its folder, or the folder itself; None if nowhere."""
    for finished in (folder, folder / MODEL):
        if (finished / CONFIG).is_file():
            return finished
    return None


def load_run(folder: Path | str) -> LoadedRun:
    """The model in a run's folder: the finished one, or else that of the newest checkpoint.

    `folder` may also be a finished model or one checkpoint.
    """
    folder = Path(folder)
    finished = finished_model(folder)
    if finished is not None:
        model = ReLUFormer.from_pretrained(finished)
        return LoadedRun(model, *_beside(finished), step=None)
    run, checkpoints = folder, steps(folder)
    if (folder / STATE).is_file():
        run, checkpoints = folder.parent.parent, [_state(folder).step]
    if not folder.exists():
        raise UserError(f"{folder}, the folder of a model or a run, does not exist")
    if not checkpoints:
        raise UserError(f"{folder} holds neither a finished model nor a checkpoint")
    tokenizer, recipe = _beside(run)
    model = ReLUFormer(recipe.model_with(tokenizer.vocab_size))
    load_tensors(model, load_weights(run, checkpoints[-1]), folder_of(run, checkpoints[-1]))
    return LoadedRun(model.eval(), tokenizer, recipe, checkpoints[-1])


def _beside(folder: Path) -> tuple[Tokenizer, Recipe]:
    return Tokenizer.load(folder / TOKENIZER), load_stored_recipe(folder / RECIPE)


def _state(folder: Path) -> RunState:
    path = folder / STATE
    try:
        state = build(RunState, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if state.format != FORMAT:
        raise UserError(f"{path} is of format {state.format}, allowed is {FORMAT}")
    return state
