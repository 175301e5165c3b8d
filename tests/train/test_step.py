"""A step's loss is the formula over the global batch, whatever fills or divides it."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from reluformer.data.batches import Batch, Batches
from reluformer.model import ReLUFormer
from reluformer.model.losses import attention_losses
from reluformer.recipe import Recipe
from reluformer.train.data import TrainingData, load_data
from reluformer.train.distributed import Processes, parallelise
from reluformer.train.step import Objective, inputs
from tests.train.tiny import tiny

ALONE = Processes(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def data() -> TrainingData:
    return load_data(tiny())


def a_model(recipe: Recipe, data: TrainingData) -> ReLUFormer:
    torch.manual_seed(1)
    return ReLUFormer(recipe.model_with(data.tokenizer.vocab_size)).double()


def some_batches(data: TrainingData, count: int, *, fixed_shapes: bool = False) -> list[Batch]:
    batches = Batches(
        data.train.corpus,
        data.train.packing.spans,
        batch_tokens=256,
        seed=3,
        fixed_shapes=fixed_shapes,
    )
    endless = batches.endless()
    return [next(endless) for _ in range(count)]


def step(recipe: Recipe, model: ReLUFormer, batches: list[Batch]) -> tuple[Tensor, list[Tensor]]:
    objective = Objective(recipe.train, model.config, ALONE, nullcontext)
    model.zero_grad()
    losses = objective.backward(parallelise(model, recipe.train, ALONE), batches, step=5)
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return losses, gradients


def test_the_loss_is_the_formula(data: TrainingData) -> None:
    recipe = tiny(smoothing=0.2, normalisation_weight=0.3, entropy_weight=0.7, model__dropout=0.0)
    model, batches = a_model(recipe, data), some_batches(data, 1)
    loss, nll, normalisation, entropy = step(recipe, model, batches)[0]
    [batch] = batches
    output = model(**inputs(batch), record="stats")
    losses = attention_losses(output.readings)
    real = batch.target_out != model.config.pad_id
    log = output.logits.log_softmax(-1)
    picked = log.gather(-1, batch.target_out.unsqueeze(-1)).squeeze(-1)[real]
    smooth = 0.8 * picked + 0.2 * log[real].mean(-1)
    torch.testing.assert_close(nll.double(), -picked.mean(), rtol=1e-6, atol=0)
    torch.testing.assert_close(normalisation.double(), losses.normalisation, rtol=1e-6, atol=0)
    torch.testing.assert_close(entropy.double(), losses.entropy, rtol=1e-6, atol=1e-9)
    wanted = -smooth.mean() + 0.3 * losses.normalisation + 0.7 * losses.entropy
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=0)
    assert int(real.sum()) == batch.target_tokens


def test_rows_that_fill_a_shape_change_nothing(data: TrainingData) -> None:
    recipe = tiny(model__dropout=0.0)
    model = a_model(recipe, data)
    trimmed, fixed = some_batches(data, 9), some_batches(data, 9, fixed_shapes=True)
    pairs = [(t, f) for t, f in zip(trimmed, fixed, strict=True) if len(f.source) > len(f.examples)]
    assert pairs
    for one, other in pairs:
        first, second = step(recipe, model, [one]), step(recipe, model, [other])
        torch.testing.assert_close(first[0], second[0])
        for a, b in zip(first[1], second[1], strict=True):
            torch.testing.assert_close(a, b)


def test_several_batches_make_one_step(data: TrainingData) -> None:
    recipe = tiny(model__dropout=0.0, normalisation_weight=0.0, entropy_weight=0.0)
    model, batches = a_model(recipe, data), some_batches(data, 3)
    losses, gradients = step(recipe, model, batches)
    total, tokens = torch.zeros(()).double(), 0
    model.zero_grad()
    for batch in batches:
        logits = model(**inputs(batch)).logits.flatten(0, 1)
        total = total + functional.cross_entropy(
            logits,
            batch.target_out.flatten(),
            ignore_index=0,
            reduction="sum",
            label_smoothing=recipe.train.smoothing,
        )
        tokens += batch.target_tokens
    (total / tokens).backward()
    torch.testing.assert_close(losses[0].double(), total.detach() / tokens)
    wanted = [p.grad for p in model.parameters() if p.grad is not None]
    for gradient, expected in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("kind", ["relu", "relu_n", "rela", "softmax"])
def test_only_rectified_attentions_are_regularised(data: TrainingData, kind: str) -> None:
    recipe = tiny(model__attention={"kind": kind}, model__dropout=0.0)
    losses, _ = step(recipe, a_model(recipe, data), some_batches(data, 1))
    assert (losses[2] > 0) == (kind in ("relu", "relu_n"))


def test_each_site_is_regularised_by_its_own_kind(data: TrainingData) -> None:
    both = tiny(model__dropout=0.0)
    cross = tiny(model__dropout=0.0, model__cross_attention={"kind": "softmax"})
    objective = Objective(cross.train, cross.model, ALONE, nullcontext)
    assert objective.regularised == {"encoder", "decoder"}
    losses = [step(r, a_model(r, data), some_batches(data, 1))[0][2] for r in (both, cross)]
    assert 0 < losses[1] < losses[0]
