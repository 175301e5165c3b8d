"""Files that the fuzz suite damages, and the functions that read each of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from reluformer.checkpoint import load_run
from reluformer.config.recipe import load_recipe, load_stored_recipe
from reluformer.data.prepare import Prepared, prepare
from reluformer.data.text import TextPair, open_text
from reluformer.data.tokenizer import Tokenizer
from reluformer.evaluation.aligned_files import read_aligned
from reluformer.translation.line_reader import LineReader

Load = Callable[[Path], object]

STRUCTURED: dict[str, Load] = {
    "model/config.json": lambda path: load_run(path.parent),
    "model/recipe.yaml": load_stored_recipe,
    "model/tokenizer.json": lambda path: Tokenizer.load(path).encode("the cat  sat"),
    "run/checkpoints/step-00000005/state.json": lambda path: load_run(path.parent),
    "data/manifest.json": lambda path: Prepared.open(path.parent).check(),
    "data/dev/manifest.json": lambda path: Prepared.open(path.parent.parent).corpus("dev"),
}
"""JSON and YAML files by their path in the sound folder."""

BINARY: dict[str, Load] = {
    "model/model.safetensors": lambda path: load_run(path.parent),
    "data/dev/source.offsets": lambda path: Prepared.open(path.parent.parent).corpus("dev"),
}
"""Other files by their path in the sound folder."""


def _prepare(path: Path) -> object:
    pair = [TextPair(path, path)]
    return prepare(path.parent / "prepared", {"train": pair}, vocab_size=300, overwrite=True)


def _translate(path: Path) -> object:
    with open_text(path) as file:
        return list(LineReader(file, str(path)).blocks(64, documents=True))


TEXT: dict[str, Load] = {
    "prepare": _prepare,
    "translate": _translate,
    "evaluate": lambda path: read_aligned(path, [path], documents=True),
    "recipe": load_recipe,
}
"""Readers of text that a user names on the command line."""


def containers(value: Any) -> list[Any]:
    """All lists and objects inside `value`, itself included."""
    if not isinstance(value, (dict, list)):
        return []
    children = value.values() if isinstance(value, dict) else value
    return [value, *(inner for child in children for inner in containers(child))]
