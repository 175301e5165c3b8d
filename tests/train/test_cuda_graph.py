"""Steps as CUDA graphs against the same steps without. Most need a GPU: `pytest -m gpu`."""

import json
from collections.abc import Callable
from contextlib import nullcontext, suppress
from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from reluformer.data.batches import Batch
from reluformer.model import ReLUFormer
from reluformer.processes import Processes
from reluformer.train import train
from reluformer.train.cuda_graph import Graphs, Work, added_together
from reluformer.train.data import load_data
from reluformer.train.data_parallel import parallelise
from reluformer.train.objective import Objective
from reluformer.train.trainer_state import compile_layers
from tests.train.tiny import tiny


def on_gpu(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that needs a CUDA device."""
    needs = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    return pytest.mark.gpu(needs(test))


@pytest.fixture
def recordable() -> None:
    # The test suite fills memory with NaN in a mode of torch that graphs cannot capture.
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("fails", [False, True])
def test_gradients_that_are_added_together(fails: bool) -> None:
    used, unused, new = (torch.nn.Parameter(torch.full((2,), value)) for value in (1.0, 2.0, 3.0))
    used.grad = kept = torch.tensor([5.0, 6.0])
    with suppress(RuntimeError), added_together([used, unused, new]):
        (used * new).sum().backward()
        assert used.grad is not kept
        if fails:
            raise RuntimeError
    assert used.grad is kept and unused.grad is None
    assert kept.tolist() == ([5.0, 6.0] if fails else [8.0, 9.0])
    assert new.grad is not None and new.grad.tolist() == [1.0, 1.0]


@on_gpu
@pytest.mark.usefixtures("recordable")
@pytest.mark.parametrize("kind", ["relu", "softmax"])
@pytest.mark.parametrize("weight", [0.0, 0.05])
def test_gradients_of_a_graph_equal_those_without(kind: str, weight: float) -> None:
    recipe = tiny(
        normalisation_weight=weight,
        entropy_weight=weight,
        batch_tokens=64,
        model__width=32,
        model__dropout=0.0,
        model__attention={"kind": kind},
    )
    data = load_data(recipe)
    torch.manual_seed(0)
    model = ReLUFormer(recipe.model_with(data.tokenizer.vocab_size)).cuda()
    group = Processes(0, 1, torch.device("cuda", 0))
    parallel = parallelise(model, recipe.train, group)
    objective = Objective(recipe.train, model.config, group, nullcontext)

    def work(batch: Batch, numbers: Tensor) -> Tensor:
        return objective.add_gradients(parallel, batch, numbers)

    graphs, shapes = Graphs(work, list(model.parameters())), set()
    numbers = torch.tensor([0.01, 0.4, 0.3], device="cuda")
    endless = data.train.batches(recipe, fixed_shapes=True).endless()
    for turn in range(30):
        batch = next(endless).to("cuda")
        shapes.add(batch.source.shape)
        numbers = numbers * 1.1
        found = []
        for run in (graphs, work):
            model.zero_grad(set_to_none=False)
            losses = run(batch, numbers).clone()
            gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            found.append((losses, gradients))
        torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-6)
        scale = max(float(gradient.abs().max()) for gradient in found[1][1])
        for replayed, wanted in zip(found[0][1], found[1][1], strict=True):
            assert float((replayed - wanted).abs().max()) <= 1e-4 * scale, turn
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.99)
    assert len(shapes) >= 2


@on_gpu
@pytest.mark.usefixtures("recordable")
def test_graphs_add_to_the_gradients_of_earlier_batches() -> None:
    recipe = tiny(batch_tokens=64, model__width=32, model__dropout=0.0)
    data = load_data(recipe)
    torch.manual_seed(0)
    model = ReLUFormer(recipe.model_with(data.tokenizer.vocab_size)).cuda()
    # The last parameter never gets a gradient.
    model.register_parameter("unused", torch.nn.Parameter(torch.ones(3, device="cuda")))
    copy = deepcopy(model)
    group = Processes(0, 1, torch.device("cuda", 0))
    objective = Objective(recipe.train, model.config, group, nullcontext)
    works: list[Work] = [
        partial(objective.add_gradients, parallelise(each, recipe.train, group))
        for each in (model, copy)
    ]
    graphs, shapes = Graphs(works[0], list(model.parameters())), set()
    numbers = torch.tensor([0.01, 0.4, 0.3], device="cuda")
    endless = data.train.batches(recipe, fixed_shapes=True).endless()
    for turn in range(40):
        if turn % 4 == 0:
            for parameter in (*model.parameters(), *copy.parameters()):
                parameter.data.mul_(0.99)
            model.zero_grad(set_to_none=False)
            copy.zero_grad(set_to_none=False)
        batch = next(endless).to("cuda")
        shapes.add(batch.source.shape)
        graphs(batch, numbers)
        works[1](batch, numbers)
        wanted = {name: p.grad for name, p in copy.named_parameters() if p.grad is not None}
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert found.keys() == wanted.keys() and "unused" not in found
        scale = max(float(gradient.abs().max()) for gradient in wanted.values())
        for name, gradient in wanted.items():
            assert float((found[name] - gradient).abs().max()) <= 1e-4 * scale, (turn, name)
    assert len(shapes) >= 2


@on_gpu
@pytest.mark.usefixtures("recordable")
@pytest.mark.parametrize("entropy_weight", [0.0, 0.05])
def test_compiled_and_captured_steps_equal_the_reference(entropy_weight: float) -> None:
    """Regularised steps: fused kernels in compiled layers, replayed, against the definition."""
    found: list[tuple[list[Tensor], list[list[Tensor]]]] = []
    for impl in ("auto", "reference"):
        recipe = tiny(
            entropy_weight=entropy_weight,
            batch_tokens=64,
            model__width=32,
            model__dropout=0.0,
            model__attention={"impl": impl, "gamma": "head"},
        )
        data = load_data(recipe)
        torch.manual_seed(0)
        model = ReLUFormer(recipe.model_with(data.tokenizer.vocab_size)).cuda()
        group = Processes(0, 1, torch.device("cuda", 0))
        parallel = parallelise(model, recipe.train, group)
        objective = Objective(recipe.train, model.config, group, nullcontext)
        assert objective.compilable is (impl == "auto")
        work: Work = partial(objective.add_gradients, parallel)
        if impl == "auto":
            torch._dynamo.reset()
            counters.clear()
            compile_layers(model)
            work = Graphs(work, list(model.parameters()))
        numbers = torch.tensor([0.01, 0.4, 0.3], device="cuda")
        losses, gradients = [], []
        endless = data.train.batches(recipe, fixed_shapes=True).endless()
        for _ in range(12):
            model.zero_grad(set_to_none=False)
            losses.append(work(next(endless).to("cuda"), numbers).clone())
            gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        if impl == "auto":
            assert counters["stats"]["unique_graphs"] > 0 and not counters["graph_break"]
        found.append((losses, gradients))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-6)
    for ours, wanted in zip(found[0][1], found[1][1], strict=True):
        scale = max(float(gradient.abs().max()) for gradient in wanted)
        for one, other in zip(ours, wanted, strict=True):
            assert float((one - other).abs().max()) <= 1e-3 * scale


@on_gpu
@pytest.mark.usefixtures("recordable")
@pytest.mark.parametrize("sample_rows", [None, 4])
def test_captured_steps_learn(tmp_path_factory: pytest.TempPathFactory, sample_rows: int) -> None:
    losses = {}
    for graphs in (False, True):
        run = tmp_path_factory.mktemp(f"graphs-{graphs}")
        settings = {"graphs": graphs, "precision": "float32", "sample_rows": sample_rows}
        recipe = tiny(device="cuda", steps=60, model__width=32, model__dropout=0.0, **settings)
        trained = train(recipe, run / "run", quiet=True)
        losses[graphs] = _last_loss(trained.folder / "metrics.jsonl")
    # The order of summation differs, and training amplifies rounding.
    assert losses[True] == pytest.approx(losses[False], rel=0.1)


def _last_loss(metrics: Path) -> float:
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return float([line["nll"] for line in lines if "nll" in line][-1])
