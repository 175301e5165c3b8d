"""How a start of a run begins: from its newest checkpoint, a calibrated fresh model, or another
run's finished one."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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
from reluformer.train.attention_stats import Attention
from reluformer.train.data import TrainingData, calibration_batches
from reluformer.train.objective import inputs
from reluformer.train.trainer_state import Learner
from reluformer.train.validation import watch

Autocast = Callable[[], AbstractContextManager[object]]

_WITH_WEIGHTS = "kept with the weights"


class Beginning(NamedTuple):
    """Where a start begins."""

    learner: Learner
    state: RunState
    attention: Attention
    """What the attentions do before the first step; empty in a resumed run."""


def newest_step(run: Path, group: Processes) -> int:
    """Step of the checkpoint to continue from, 0 if there is none.

    All processes continue from the checkpoint that the main one sees.
    """
    newest = torch.tensor(max(checkpoint.steps(run), default=0) if group.main else 0)
    return int(group.add(newest.to(group.device)))


def take_weights(model: ReLUFormer, recipe: Recipe, data: TrainingData) -> None:
    """Put the finished weights of the run that `train.start_from` names into `model`.

    Every process reads them, as every process reads a checkpoint.
    """
    folder = recipe.train.start_from
    assert folder is not None
    finished = checkpoint.finished_model(Path(folder))
    if finished is None:
        raise UserError(f"train.start_from must be a run with a finished model, got {folder!r}")
    found = checkpoint.load_run(finished)
    if found.tokenizer.sha256 != data.tokenizer.sha256:
        raise UserError(
            f"train.start_from {folder} was trained with another tokenizer than that of "
            f"data.source {recipe.data.source}: their checksums are "
            f"{found.tokenizer.sha256[:16]} and {data.tokenizer.sha256[:16]}"
        )
    _check_weights_mean_the_same(found.model, model, folder)
    try:
        load_tensors(model, distinct_tensors(found.model), finished / WEIGHTS)
    except UserError as error:
        raise UserError(f"train.start_from {error}") from None


def _check_weights_mean_the_same(found: ReLUFormer, model: ReLUFormer, folder: str) -> None:
    """Refuse another function of the scores: gamma and thresholds were learned for the old one."""
    for site in get_args(Site):
        there, here = (each.config.attention_at(site) for each in (found, model))
        if there.kind != here.kind:
            # A choice, where their tensors fit: from softmax to sparsemax, say.
            continue
        before, now = _options(there), _options(here)
        if there.thresholds and not here.thresholds and now.get("threshold") == _WITH_WEIGHTS:
            now["threshold"] = 0.0
        for name in sorted(before):
            if before[name] != now[name]:
                raise UserError(
                    f"train.start_from {folder} was trained with {name} {before[name]} in the "
                    f"{site} attention, {_field(model, site, name)} is {now[name]} here"
                )


def _options(config: AttentionConfig) -> dict[str, Any]:
    """All options of an attention, as far as they are no tensors."""
    row = ATTENTIONS[config.kind]
    return {**row.defaults, **dict.fromkeys(row.learned, _WITH_WEIGHTS), **config.fixed_options}


def _field(model: ReLUFormer, site: Site, name: str) -> str:
    """Where a recipe has an option of the attention at a site."""
    own = getattr(model.config, f"{site}_attention")
    attention = model.config.attention_at(site)
    rule = "gamma" in ATTENTIONS[attention.kind].options and hasattr(attention, name)
    section = "attention" if own is None else f"{site}_attention"
    further = name in attention.options or not rule
    return f"model.{section}.{'options.' if further else ''}{name}"


def begin(
    recipe: Recipe, run: Path, group: Processes, data: TrainingData, model: ReLUFormer
) -> Beginning:
    """Put the newest checkpoint into `model`; without one, calibrate it unless it was trained."""
    step = newest_step(run, group)
    if step == 0:
        attention = _prepare(recipe, group, data, model.to(group.device))
        return Beginning(Learner(model, recipe.train, group), RunState(), attention)
    folder = checkpoint.folder_of(run, step)
    try:
        found = checkpoint.load(run, step)
    except UserError as error:
        raise UserError(
            f"{error}; without the folder {folder} training goes on from the checkpoint before"
        ) from None
    load_tensors(model, found.tensors["model"], folder)
    learner = Learner(model, recipe.train, group)
    learner.restore(found.tensors)
    return Beginning(learner, found.state, {})


@contextmanager
def torch_settings(config: TrainConfig, device: torch.device) -> Iterator[None]:
    """Switches of torch for a run: threads, determinism, tensor cores for float32 on a GPU.

    They are global, and put back afterwards.
    """
    threads, matmul = torch.get_num_threads(), torch.get_float32_matmul_precision()
    strict = torch.are_deterministic_algorithms_enabled()
    lenient = torch.is_deterministic_algorithms_warn_only_enabled()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(matmul)
        torch.use_deterministic_algorithms(strict, warn_only=lenient)


def autocast(config: TrainConfig, device: torch.device) -> Autocast:
    """Makes contexts in which the model computes with the recipe's precision."""
    precision = config.precision or ("bfloat16" if device.type == "cuda" else "float32")
    enabled = precision == "bfloat16"
    return lambda: torch.autocast(device.type, torch.bfloat16, enabled=enabled)


def _prepare(recipe: Recipe, group: Processes, data: TrainingData, model: ReLUFormer) -> Attention:
    """Set every gamma of fresh weights from batches of all lengths; see what attentions then do."""
    batches = [batch.to(group.device) for batch in calibration_batches(recipe, data)]
    fresh = recipe.train.start_from is None
    if fresh and any(isinstance(module, Gamma) for module in model.modules()):
        model.calibrate(inputs(batch) for batch in batches)
    return watch(model, batches, group, autocast(recipe.train, group.device))
