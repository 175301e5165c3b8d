"""Initial state of training: the newest checkpoint, a calibrated new model, or the weights of
another run."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch

from reluformer import checkpoint
from reluformer.checkpoint import RunState
from reluformer.config.recipe import Recipe
from reluformer.config.train import TrainConfig
from reluformer.errors import UserError
from reluformer.model import ReLUFormer
from reluformer.model.config import AttentionConfig, Site
from reluformer.model.gamma import Gamma
from reluformer.model.pretrained import WEIGHTS, distinct_tensors, load_tensors
from reluformer.ops.family.table import ATTENTIONS
from reluformer.processes import Processes
from reluformer.shipped import model_folder
from reluformer.train.attention_stats import AttentionStats
from reluformer.train.data import TrainingData, calibration_batches
from reluformer.train.objective import inputs
from reluformer.train.trainer_state import TrainerState
from reluformer.train.validation import measure_attention

Autocast = Callable[[], AbstractContextManager[object]]

# Stands for an option whose value is among the weights.
_LEARNED = "kept with the weights"


class InitialState(NamedTuple):
    """State before the first step of this process."""

    trainer: TrainerState
    state: RunState
    attention: AttentionStats
    """Statistics of the attentions before the first step; empty in a resumed run."""


def newest_step(run: Path, group: Processes) -> int:
    """Step of the checkpoint to resume from; 0 if there is none.

    All ranks resume from the checkpoint that rank 0 finds.
    """
    newest = torch.tensor(max(checkpoint.steps(run), default=0) if group.main else 0)
    return int(group.add(newest.to(group.device)))


def load_start_weights(model: ReLUFormer, recipe: Recipe, data: TrainingData) -> None:
    """Load the finished weights of the run `train.start_from` into `model`, on every rank.

    Raises:
        UserError: The run has no finished model, or its tokenizer or attention differs.
    """
    folder = recipe.train.start_from
    assert folder is not None
    finished = checkpoint.finished_model(model_folder(folder))
    if finished is None:
        raise UserError(f"train.start_from must be a run with a finished model, got {folder!r}")
    loaded = checkpoint.load_run(finished)
    if loaded.tokenizer.sha256 != data.tokenizer.sha256:
        raise UserError(
            f"train.start_from {folder} was trained with another tokenizer than that of "
            f"data.source {recipe.data.source}: their checksums are "
            f"{loaded.tokenizer.sha256[:16]} and {data.tokenizer.sha256[:16]}"
        )
    _check_same_rule(loaded.model, model, folder)
    try:
        load_tensors(model, distinct_tensors(loaded.model), finished / WEIGHTS)
    except UserError as error:
        raise UserError(f"train.start_from {error}") from None


def _check_same_rule(loaded: ReLUFormer, model: ReLUFormer, folder: str) -> None:
    """Raise UserError if weights of `loaded` were learned with another function of the scores."""
    for site in get_args(Site):
        there, here = (one.config.attention_at(site) for one in (loaded, model))
        if there.kind != here.kind:
            # Another kind is allowed if the tensors fit, for example sparsemax after softmax.
            continue
        before, now = _options(there), _options(here)
        if there.thresholds and not here.thresholds and now.get("threshold") == _LEARNED:
            now["threshold"] = 0.0
        for name in sorted(before):
            if before[name] != now[name]:
                raise UserError(
                    f"train.start_from {folder} was trained with {name} {before[name]} in the "
                    f"{site} attention, {_field(model, site, name)} is {now[name]} here"
                )


def _options(config: AttentionConfig) -> dict[str, Any]:
    """Options of an attention by name; learned ones are `_LEARNED`."""
    row = ATTENTIONS[config.kind]
    return {**row.defaults, **dict.fromkeys(row.learned, _LEARNED), **config.fixed_options}


def _field(model: ReLUFormer, site: Site, name: str) -> str:
    """Path in the recipe of an option of the attention at a site."""
    own = getattr(model.config, f"{site}_attention")
    attention = model.config.attention_at(site)
    rule = "gamma" in ATTENTIONS[attention.kind].options and hasattr(attention, name)
    section = "attention" if own is None else f"{site}_attention"
    further = name in attention.options or not rule
    return f"model.{section}.{'options.' if further else ''}{name}"


def initialise(
    recipe: Recipe, run: Path, group: Processes, data: TrainingData, model: ReLUFormer
) -> InitialState:
    """Load the newest checkpoint into `model`, or calibrate it if there is none.

    A model with weights of `train.start_from` is not calibrated.
    """
    step = newest_step(run, group)
    if step == 0:
        attention = _calibrate(recipe, group, data, model.to(group.device))
        return InitialState(TrainerState(model, recipe.train, group), RunState(), attention)
    folder = checkpoint.folder_of(run, step)
    try:
        required = () if recipe.train.ema is None else ("ema",)
        loaded = checkpoint.load(run, step, *required)
    except UserError as error:
        raise UserError(
            f"{error}; delete the folder {folder} to resume from the previous checkpoint"
        ) from None
    load_tensors(model, loaded.tensors["model"], folder)
    trainer = TrainerState(model, recipe.train, group)
    trainer.restore(loaded.tensors)
    return InitialState(trainer, loaded.state, {})


def autocast(config: TrainConfig, device: torch.device) -> Autocast:
    """A function that returns an autocast context with the recipe's precision."""
    precision = config.precision or ("bfloat16" if device.type == "cuda" else "float32")
    enabled = precision == "bfloat16"
    return lambda: torch.autocast(device.type, torch.bfloat16, enabled=enabled)


def _calibrate(
    recipe: Recipe, group: Processes, data: TrainingData, model: ReLUFormer
) -> AttentionStats:
    """Calibrate gamma unless weights were loaded; return statistics of the attentions."""
    batches = [batch.to(group.device) for batch in calibration_batches(recipe, data)]
    fresh = recipe.train.start_from is None
    if fresh and any(isinstance(module, Gamma) for module in model.modules()):
        model.calibrate(inputs(batch) for batch in batches)
    return measure_attention(model, batches, group, autocast(recipe.train, group.device))
