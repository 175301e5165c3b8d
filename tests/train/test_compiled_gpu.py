"""Compiled training on a GPU: attentions of the studies train a few steps. `pytest -m gpu`."""

from pathlib import Path

import pytest
import torch

from reluformer.config.recipe import load_recipe
from reluformer.train import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("kind", ["relu", "softmax", "rela", "sparsemax", "entmax15", "sigmoid"])
def test_compiled_training(tmp_path: Path, kind: str) -> None:
    settings = ["train.compile=true", "train.device=cuda", "train.steps=3", "train.bleu_every=null"]
    recipe = load_recipe("tiny", [f"model.attention.kind={kind}", *settings])
    train(recipe, tmp_path / "run")
    assert (tmp_path / "run" / "model").is_dir()
