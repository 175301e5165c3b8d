"""A tiny model on disk, and translators whose results are known."""

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from reluformer import Translator
from reluformer.config.recipe import recipe_from
from reluformer.data.synthetic import sample
from reluformer.data.tokenizer import Tokenizer
from reluformer.model import ReLUFormer
from reluformer.translation.cancellation import check_cancelled


def tiny_model(folder: Path, **attention: object) -> Path:
    """Write a finished model with random weights; its attention has exact zeros by default."""
    torch.manual_seed(0)
    shape = {"width": 16, "heads": 2, "encoder_layers": 2, "decoder_layers": 2, "slots": 16}
    shape["attention"] = attention or {"power": 1, "threshold_init": 0.0}
    data = {"source": "sample", "unit": "document", "max_length": 64}
    recipe = recipe_from({"data": data, "model": shape, "decode": {"beam": 1}})
    tokenizer = Tokenizer.train([text for pair in sample.sentences(0, 50) for text in pair], 300)
    ReLUFormer(recipe.model_with(tokenizer.vocab_size)).save_pretrained(folder)
    tokenizer.save(folder / "tokenizer.json")
    recipe.save(folder / "recipe.yaml")
    return folder


class EchoTranslator(Translator):
    """Translates into upper case, after `delay` seconds for each sentence."""

    delay = 0.0

    @property
    def groups(self) -> list[list[str]]:
        """Sentences of each call."""
        return self.__dict__.setdefault("_groups", [])

    def lines(
        self,
        lines: Sequence[str],
        *,
        together: bool = False,
        numbers: Sequence[int] | None = None,
        unit: str = "line",
    ) -> list[str]:
        """Upper case of each line."""
        self.groups.append(list(lines))
        for _ in lines:
            end = time.monotonic() + self.delay
            while time.monotonic() < end:
                check_cancelled()
                time.sleep(0.005)
        return [line.upper() for line in lines]
