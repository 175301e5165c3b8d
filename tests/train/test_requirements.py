"""Estimated needs of a run: exact parameters, and refusal of models that cannot fit."""

import time

import pytest
import torch

from reluformer import recipes
from reluformer.config.recipe import load_recipe
from reluformer.errors import UserError
from reluformer.model import ReLUFormer
from reluformer.train import requirements
from reluformer.train.requirements import check, estimate


@pytest.mark.parametrize("change", ["model.memory=relu", "model.attention.gamma=model"])
def test_parameters_are_counted_without_building_the_model(change: str) -> None:
    sizes = ["model.encoder_layers=3", "model.decoder_layers=4", "model.tie_embeddings=false"]
    recipe = load_recipe("tiny", [*sizes, change])
    model = ReLUFormer(recipe.model_with(300))
    assert estimate(recipe, 300).parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("field", ["encoder_layers", "slots", "width"])
def test_a_model_beyond_the_memory_is_refused_at_once(field: str) -> None:
    begin = time.monotonic()
    needs = estimate(load_recipe("tiny", [f"model.{field}=1000000000"]), 300)
    with pytest.raises(UserError, match=r"model needs [\d,]+ GB for weights and optimiser, but"):
        check(needs, torch.device("cpu"), 1)
    assert time.monotonic() - begin < 5


def test_a_run_that_may_not_fit_is_announced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    needs = estimate(load_recipe("document"), 32_000)
    for gigabytes in (4, 1000):
        monkeypatch.setattr(requirements, "_memory", lambda device, size=gigabytes: size * 10**9)
        check(needs, torch.device("cpu"), 1)
    (message,) = caplog.messages
    assert message.startswith("this run may need ") and "but the cpu has 4 GB" in message


def test_shipped_recipes_for_cpus_need_little_memory() -> None:
    for name in ("tiny", "toy-reverse", "small"):
        assert estimate(load_recipe(name), 8000).memory_bytes < 2e9
    text = str(estimate(load_recipe("small"), 8000))
    assert text == "6.0 million parameters, about 0.6 GB of memory, at most 12,288,000 tokens"
    assert "small" in recipes.names()
