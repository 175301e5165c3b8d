"""Shipped recipes: each trains at a small size, and `paper` holds the published values."""

import json
from pathlib import Path

import pytest

from reluformer import recipes
from reluformer.checkpoint import load_run
from reluformer.config.recipe import load_recipe
from reluformer.config.schema import to_dict
from reluformer.model import AttentionConfig, ModelConfig
from reluformer.train import train

SMALL = [
    "data.generated={train: 60, dev: 4, vocab_size: 300, lengths: [2, 6]}",
    "model.width=16",
    "model.slots=16",
    "model.encoder_layers=1",
    "model.decoder_layers=1",
    "train.steps=3",
    "train.warmup=1",
    "train.checkpoint_every=1",
    "train.log_every=1",
    "train.dev_every=3",
    "train.bleu_every=3",
    "train.bleu_examples=2",
    "train.device=cpu",
    "train.compile=false",
]


@pytest.mark.parametrize("name", recipes.names())
def test_a_shipped_recipe_trains(name: str, tmp_path: Path) -> None:
    generated = load_recipe(name).data.generated is not None
    # Recipes for real corpora use generated data here, with a vocabulary of its own.
    source = [] if generated else ["data.source=sample", "train.start_from=null"]
    recipe = load_recipe(name, [*SMALL, *source, "train.batch_tokens=1024"])
    train(recipe, tmp_path, quiet=True)
    records = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    last = [record for record in records if "dev" in record][-1]
    assert last["step"] == 3 and set(last["dev"]) == {"nll", "bleu"}
    assert load_run(tmp_path).recipe == recipe


PUBLISHED = {
    "model": {
        "width": 512,
        "heads": 4,
        "encoder_layers": 6,
        "decoder_layers": 6,
        "slots": 1024,
        "memory": "relu",
        "norm": "post",
        "positions": "sinusoidal",
        "dropout": 0.3,
        "encoder_attention": None,
        "decoder_attention": None,
        "cross_attention": None,
    },
    "attention": {
        "kind": "relu",
        "power": 1,
        "row_normalise": None,
        "length_exponent": 0.5,
        "gamma": "layer",
        "gamma_init": 1.0,
        "row_sum_init": None,
        "threshold": "fixed",
        "threshold_init": 0.0,
        "dropout": 0.0,
    },
    "train": {
        "batch_tokens": 4096,
        "lr": 5e-4,
        "warmup": 4000,
        "schedule": "inverse_sqrt",
        "betas": [0.9, 0.98],
        "weight_decay": 1e-4,
        "smoothing": 0.1,
        "normalisation_weight": 0.05,
        "entropy_weight": 0.05,
        "entropy_margin": 0.7,
        "entropy_every": 1,
        "sample_rows": None,
        "regulariser_warmup": 0,
    },
    "decode": {"beam": 5, "max_ratio": 1.2, "max_extra": 10},
}


def test_the_paper_recipe_has_every_published_value() -> None:
    recipe = load_recipe("paper")
    assert recipe.model == ModelConfig.paper(recipe.model.vocabulary)
    assert recipe.model.attention == AttentionConfig.paper()
    values = to_dict(recipe)
    values["attention"] = values["model"].pop("attention")
    for section, fields in PUBLISHED.items():
        assert {name: values[section][name] for name in fields} == fields


def test_the_paper_recipe_minimises_both_losses(tmp_path: Path) -> None:
    changes = ["data.source=sample", "train.batch_tokens=1024", "train.steps=2"]
    recipe = load_recipe("paper", [*SMALL, *changes])
    train(recipe, tmp_path, quiet=True)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if "loss" in record]
    assert [record["step"] for record in steps] == [1, 2]
    assert all(record["normalisation"] > 0 and record["entropy"] > 0 for record in steps)
