"""The loss of a step equals its formula over the global batch, however batches are divided."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from reluformer.config.recipe import Recipe
from reluformer.data.batches import Batch, Batches
from reluformer.model import ReLUFormer
from reluformer.model.losses import attention_losses
from reluformer.processes import Processes
from reluformer.train.data import TrainingData, load_data
from reluformer.train.data_parallel import Parallel, parallelise
from reluformer.train.objective import Objective, inputs
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
    weights = {"normalisation_weight": 0.3, "entropy_weight": 0.7, "entropy_margin": 0.2}
    # At step 5, half of the warm-up is over.
    recipe = tiny(smoothing=0.2, regulariser_warmup=10, model__dropout=0.0, **weights)
    model, batches = a_model(recipe, data), some_batches(data, 1)
    loss, nll, normalisation, entropy, balance = step(recipe, model, batches)[0]
    [batch] = batches
    output = model(**inputs(batch), record="stats")
    losses = attention_losses(output.records, 0.2)
    real = batch.target_out != model.config.pad_id
    log = output.logits.log_softmax(-1)
    picked = log.gather(-1, batch.target_out.unsqueeze(-1)).squeeze(-1)[real]
    smooth = 0.8 * picked + 0.2 * log[real].mean(-1)
    torch.testing.assert_close(nll.double(), -picked.mean(), rtol=1e-6, atol=0)
    torch.testing.assert_close(normalisation.double(), losses.normalisation, rtol=1e-6, atol=0)
    torch.testing.assert_close(entropy.double(), losses.entropy, rtol=1e-6, atol=1e-9)
    wanted = -smooth.mean() + 0.5 * (0.3 * losses.normalisation + 0.7 * losses.entropy)
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=0)
    assert int(real.sum()) == batch.target_tokens and balance == 0


MOE = {"model__memory": "sigma_moe", "model__memory_options": {"experts": 4, "k": 2}}


@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_the_expert_balance_loss_is_added(data: TrainingData, fixed_shapes: bool) -> None:
    recipe = tiny(model__dropout=0.0, expert_balance_weight=0.3, **MOE)
    model, batches = a_model(recipe, data), some_batches(data, 2, fixed_shapes=fixed_shapes)
    losses, gradients = step(recipe, model, batches)
    without = tiny(model__dropout=0.0, expert_balance_weight=0.0, **MOE)
    others, plain = step(without, model, batches)
    tokens = [batch.target_tokens for batch in batches]
    wanted = torch.zeros(())
    model.zero_grad()
    for batch, count in zip(batches, tokens, strict=True):
        real = batch.target_lengths > 0
        output = model(**{name: tensor[real] for name, tensor in inputs(batch).items()})
        choices = torch.stack([layer.sum(0) for layer in output.expert_choices])
        assert len(choices) == 2
        for mean in choices / choices.sum(-1, keepdim=True):
            wanted = wanted + count / sum(tokens) * (mean * mean.log()).sum()
    (0.3 * wanted).backward()
    torch.testing.assert_close(losses[4].double(), wanted, rtol=1e-6, atol=0)
    torch.testing.assert_close(losses[0], others[0] + 0.3 * losses[4])
    assert others[4] == 0
    expected = [p.grad for p in model.parameters()]
    for total, part, extra in zip(gradients, plain, expected, strict=True):
        torch.testing.assert_close(total, part if extra is None else part + extra)


def test_the_default_expert_balance_weight_depends_on_the_memory() -> None:
    assert tiny().train.expert_balance_weight == 0.0
    assert tiny(**MOE).train.expert_balance_weight == 0.001
    assert tiny(expert_balance_weight=0.0, **MOE).train.expert_balance_weight == 0.0


def test_a_step_samples_entropies(data: TrainingData) -> None:
    recipe = tiny(model__dropout=0.0, entropy_weight=0.7, entropy_every=2)
    model, batches = a_model(recipe, data), some_batches(data, 1)
    entropy = step(recipe, model, batches)[0][3]
    found = model(**inputs(batches[0]), record="entropy", entropy_every=2)
    wanted = attention_losses(found.records).entropy
    torch.testing.assert_close(entropy.double(), wanted, rtol=1e-6, atol=1e-9)
    whole = attention_losses(model(**inputs(batches[0]), record="entropy").records).entropy
    assert not torch.isclose(wanted, whole)


@pytest.mark.parametrize(
    ("normalisation", "entropy", "record"),
    [(0.0, 0.0, "nothing"), (0.1, 0.0, "row_sum"), (0.0, 0.1, "entropy"), (0.1, 0.1, "entropy")],
)
def test_only_losses_with_a_weight_are_recorded(
    normalisation: float, entropy: float, record: str
) -> None:
    recipe = tiny(normalisation_weight=normalisation, entropy_weight=entropy)
    assert Objective(recipe.train, recipe.model, ALONE, nullcontext).record == record


def test_a_step_without_entropies_is_the_same(data: TrainingData) -> None:
    recipe = tiny(model__dropout=0.0, entropy_weight=0.0)
    model, batches = a_model(recipe, data), some_batches(data, 2)
    losses, gradients = step(recipe, model, batches)
    # This weight is too small to change gradients, but entropies are recorded.
    tiniest = tiny(model__dropout=0.0, entropy_weight=1e-300)
    others, expected = step(tiniest, model, batches)
    torch.testing.assert_close(losses[:3], others[:3])
    assert losses[3] == 0 and others[3] > 0
    torch.testing.assert_close(gradients, expected)


TRITON = {"kind": "relu", "impl": "triton"}


@pytest.mark.parametrize(
    ("fields", "compilable"),
    [
        ({"normalisation_weight": 0.0, "entropy_weight": 0.0}, True),
        ({"model__attention": {"kind": "softmax"}}, True),
        ({}, False),
        ({"model__attention": TRITON}, True),
        ({"model__attention": TRITON, "sample_rows": 4}, False),
        ({"model__attention": TRITON, "model__cross_attention": {"kind": "softmax"}}, True),
        ({"model__attention": TRITON, "model__cross_attention": {"kind": "leaky_relu"}}, False),
    ],
)
def test_layers_run_compiled_unless_the_reference_computes_sums(
    data: TrainingData,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
    compilable: bool,
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    recipe = tiny(model__width=32, **fields)
    objective = Objective(recipe.train, recipe.model, ALONE, nullcontext)
    assert objective.compilable is compilable
    stances: list[str] = []

    class Stopped(Exception):
        pass

    def forward(**arguments: Any) -> None:
        assert arguments["record"] == objective.record
        raise Stopped

    def set_stance(stance: str) -> AbstractContextManager[None]:
        stances.append(stance)
        return nullcontext()

    monkeypatch.setattr(torch.compiler, "set_stance", set_stance)
    parallel = Parallel(a_model(recipe, data), forward, lambda last: nullcontext())
    with pytest.raises(Stopped):
        objective.add_gradients(parallel, some_batches(data, 1)[0], torch.ones(3))
    assert stances == ([] if compilable else ["force_eager"])


def test_examples_that_fill_a_shape_have_no_effect(data: TrainingData) -> None:
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


def test_regularisation_depends_on_the_kind_of_each_site(data: TrainingData) -> None:
    both = tiny(model__dropout=0.0)
    cross = tiny(model__dropout=0.0, model__cross_attention={"kind": "softmax"})
    objective = Objective(cross.train, cross.model, ALONE, nullcontext)
    assert objective.regularised == {"encoder", "decoder"}
    losses = [step(r, a_model(r, data), some_batches(data, 1))[0][2] for r in (both, cross)]
    assert 0 < losses[1] < losses[0]
