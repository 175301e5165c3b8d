"""The finished model, from the last checkpoints of a run."""

from pathlib import Path

import torch

from reluformer import checkpoint
from reluformer.checkpoint import MODEL, RECIPE, TOKENIZER, RunState, Tensors
from reluformer.config.recipe import Recipe
from reluformer.data.tokenizer import Tokenizer
from reluformer.files import atomic_folder
from reluformer.model import ReLUFormer
from reluformer.model.pretrained import distinct_tensors, load_tensors
from reluformer.processes import Processes
from reluformer.train.data import TrainingData
from reluformer.train.initialise import autocast
from reluformer.train.rescale_scores import ScoreRescaling, rescale_scores
from reluformer.train.validation import dev_loss


def final_weights(run: Path, recipe: Recipe, state: RunState) -> Tensors:
    """Weights selected by `train.final`, from the checkpoints of a run that has ended."""
    final = recipe.train.final
    if final == "average":
        return average([checkpoint.load_weights(run, step) for step in _last(run, recipe)])
    if final == "best":
        assert state.best_step is not None
        return checkpoint.load_weights(run, state.best_step)
    if final == "ema":
        tensors = checkpoint.load(run, state.step).tensors
        # The moving average covers parameters; buffers come from the model.
        return {**tensors["model"], **tensors["ema"]}
    return checkpoint.load_weights(run, state.step)


def average(weights: list[Tensors]) -> Tensors:
    """Mean of each tensor over several models, computed in float64."""
    return {
        name: torch.stack([tensors[name].double() for tensors in weights]).mean(0).to(first.dtype)
        for name, first in weights[0].items()
    }


def finish(
    run: Path, recipe: Recipe, state: RunState, data: TrainingData, device: torch.device
) -> ScoreRescaling | None:
    """Write the finished model; return the rescaling of scores if the recipe has one."""
    weights, rescaled = final_weights(run, recipe, state), None
    if recipe.train.rescale_scores:
        weights, rescaled = _rescaled(weights, recipe, data, device)
    write_model(run, recipe, data.tokenizer, weights)
    return rescaled


def write_model(run: Path, recipe: Recipe, tokenizer: Tokenizer, weights: Tensors) -> Path:
    """Write the self-contained folder `DIR/model` atomically, which finishes the run."""
    folder = run / MODEL
    model = _model(recipe, tokenizer, weights, folder)
    with atomic_folder(folder) as partial:
        model.save_pretrained(partial)
        tokenizer.save(partial / TOKENIZER)
        recipe.save(partial / RECIPE)
    return folder


def _model(recipe: Recipe, tokenizer: Tokenizer, weights: Tensors, path: Path) -> ReLUFormer:
    model = ReLUFormer(recipe.model_with(tokenizer.vocab_size))
    load_tensors(model, weights, path)
    return model


def _rescaled(
    weights: Tensors, recipe: Recipe, data: TrainingData, device: torch.device
) -> tuple[Tensors, ScoreRescaling]:
    assert data.dev is not None
    model = _model(recipe, data.tokenizer, weights, Path("the last checkpoint")).to(device)
    # Only rank 0 computes; the others wait.
    batches, alone = data.dev.batches(recipe), Processes(0, 1, device)
    precision = autocast(recipe.train, device)
    rescaling = rescale_scores(model, lambda: dev_loss(model, batches, alone, precision))
    return distinct_tensors(model.cpu()), rescaling


def _last(run: Path, recipe: Recipe) -> list[int]:
    return checkpoint.steps(run)[-recipe.train.average_last :]
