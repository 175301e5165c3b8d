"""The factor of attention scores that is chosen after training."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from reluformer.checkpoint import load_run
from reluformer.errors import UserError
from reluformer.model import ModelConfig, ReLUFormer
from reluformer.model.config import AttentionConfig
from reluformer.processes import Processes
from reluformer.train import train
from reluformer.train.data import load_data
from reluformer.train.initialise import autocast
from reluformer.train.rescale_scores import rescale_scores
from reluformer.train.validation import dev_loss

from .tiny import tiny


def model(**attention: object) -> ReLUFormer:
    torch.manual_seed(0)
    config = AttentionConfig(kind="softmax", **attention)
    sizes = {"vocabulary": 11, "width": 16, "heads": 2, "slots": 16}
    layers = {"encoder_layers": 1, "decoder_layers": 1}
    return ReLUFormer(ModelConfig(**sizes, **layers, attention=config)).eval()


@torch.no_grad()
def maps(of: ReLUFormer) -> list[Tensor]:
    tokens = torch.arange(1, 8).unsqueeze(0)
    return [r.weights for r in of(source=tokens, target=tokens, record="weights").records]


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("best", [0.6, 1.0, 1.5])
def test_every_score_is_multiplied_by_the_best_factor(best: float, qk_norm: bool) -> None:
    tried = model(qk_norm=qk_norm)
    # Differences of the first attention's log weights are differences of its scores.
    first = maps(tried)[0].log().diff(dim=-1)

    def factor() -> float:
        return float((maps(tried)[0].log().diff(dim=-1) * first).sum() / first.square().sum())

    found = rescale_scores(tried, lambda: math.log(factor() / best) ** 2)
    assert found.factor == pytest.approx(factor(), rel=1e-4)
    # In steps of 5 %, the nearest factor is at most half a step away.
    assert found.factor == pytest.approx(best, rel=0.026)
    assert found.after <= found.before
    assert found.after == pytest.approx(math.log(factor() / best) ** 2, abs=1e-6)


def test_the_search_ends_if_the_loss_always_falls() -> None:
    losses = iter(range(0, -1000, -1))
    assert rescale_scores(model(), lambda: float(next(losses))).factor == pytest.approx(0.95**20)


def test_a_factor_without_a_finite_loss_is_not_taken() -> None:
    losses = iter([2.0, 1.0, math.nan])
    found = rescale_scores(model(), lambda: next(losses))
    assert found.factor == 0.95 and found.after == 1.0


def test_a_finished_run_is_rescaled_and_reports_it(tmp_path: Path) -> None:
    recipe = tiny(rescale_scores=True, model__dropout=0.5, lr=0.02, steps=12)
    train(recipe, tmp_path / "run", quiet=True)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    found = json.loads(lines[-1])["rescaled"]
    assert found["factor"] != 1.0
    assert found["after"] < found["before"]
    data, alone = load_data(recipe), Processes(0, 1, torch.device("cpu"))
    assert data.dev is not None
    bits = autocast(recipe.train, alone.device)
    loaded = load_run(tmp_path / "run").model
    after = dev_loss(loaded, data.dev.batches(recipe), alone, bits)
    assert after == pytest.approx(found["after"], rel=1e-6)


def test_rescaling_needs_a_dev_loss() -> None:
    with pytest.raises(UserError, match="rescale_scores needs train.dev_every"):
        tiny(rescale_scores=True, dev_every=None)
