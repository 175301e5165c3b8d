"""Every shipped recipe trains, at a size that a test can afford."""

import json
from pathlib import Path

import pytest

from reluformer import recipes
from reluformer.checkpoint import load_run
from reluformer.config.recipe import load_recipe
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
    # Recipes for real corpora learn from the sample here.
    source = [] if generated else ["data.source=sample"]
    recipe = load_recipe(name, [*SMALL, *source, "train.batch_tokens=1024"])
    train(recipe, tmp_path, quiet=True)
    records = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    last = [record for record in records if "dev" in record][-1]
    assert last["step"] == 3 and set(last["dev"]) == {"nll", "bleu"}
    assert load_run(tmp_path).recipe == recipe
