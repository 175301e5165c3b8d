"""Prepared folders for the corpora that cells name, given or generated."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from reluformer.config.data import GENERATED
from reluformer.config.recipe import Recipe
from reluformer.data.prepare import Prepared, prepare
from reluformer.data.synthetic import sample
from reluformer.data.text import TextPair, write_documents
from reluformer.errors import UserError, quote
from reluformer.files import real_path, remove_partials

TESTS: dict[str, tuple[str, ...]] = {
    "europarl-sent": ("test",),
    "europarl-doc": ("test", "test.long"),
}
"""Test sets of each corpus."""

_PREPARE = "reluformer prepare data/{name} --corpus {name} --root DATA --vocab-size {size}"
_VOCABULARIES = {"europarl-sent": 10_000, "europarl-doc": 30_000}
_GENERATED_VOCABULARY = 600
_SAMPLE = {"train": 1500, "dev": 24, "test": 24, "test.long": 6}
_PARTS: dict[str, sample.Split] = {
    "train": "train",
    "dev": "dev",
    "test": "test",
    "test.long": "test",
}


def find_corpora(names: Sequence[str], data_options: Sequence[str]) -> dict[str, Path]:
    """Folder where each corpus should be.

    Args:
        names: Corpora that the cells need.
        data_options: Values of `--data`: a folder that holds all corpora by name, or NAME=FOLDER.

    Raises:
        UserError: An option names a corpus that no study uses.
    """
    mapped = dict(value.split("=", 1) for value in data_options if "=" in value)
    for name in mapped:
        if name not in TESTS:
            raise UserError(f"data must name {' or '.join(TESTS)}, got {quote(name)}")
    parents = [Path(value) for value in data_options if "=" not in value] or [Path("data")]
    folders = {}
    for name in names:
        candidates = [Path(mapped[name])] if name in mapped else [p / name for p in parents]
        folders[name] = next((path for path in candidates if path.is_dir()), candidates[0])
    return {name: real_path(folder) for name, folder in folders.items()}


def check_corpora(folders: Mapping[str, Path]) -> None:
    """Raise UserError unless prepared folders, by corpus name, hold all that studies need."""
    for name, folder in folders.items():
        if not folder.is_dir():
            command = _PREPARE.format(name=name, size=_VOCABULARIES[name])
            raise UserError(
                f"corpus {name} is not prepared at {folder}; prepare it with `{command}`, "
                f"or name its folder with --data {name}=FOLDER"
            )
        prepared = Prepared.open(folder)
        prepared.check()
        for split in ("train", "dev", *TESTS[name]):
            if split not in prepared.splits:
                raise UserError(f"corpus {name} at {folder} has no split {split!r}")


def generate_corpora(folders: Mapping[str, Path]) -> None:
    """Generate and prepare the corpora of the tiny budget in their folders."""
    for name, folder in folders.items():
        _generate(folder.parent, name)


def fingerprint(folder: Path) -> str:
    """Identity of a prepared corpus: a checksum of its tokenizer and its encoded splits."""
    manifest = Prepared.open(folder).manifest
    content = {name: manifest.get(name) for name in ("tokenizer", "splits")}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def vocabulary_size(recipe: Recipe, *, is_generated: bool) -> int:
    """Size of the vocabulary of a recipe's data, also before it is prepared.

    Args:
        recipe: The recipe of a training.
        is_generated: Whether generated text takes the place of all corpora.
    """
    if recipe.data.generated is not None:
        return recipe.data.generated.vocab_size
    folder = Path(recipe.data.source)
    size = Prepared.open(folder).manifest.get("vocab_size") if folder.is_dir() else None
    if isinstance(size, int):
        return size
    if is_generated:
        return _GENERATED_VOCABULARY
    return _VOCABULARIES.get(folder.name, max(_VOCABULARIES.values()))


def check_sources(recipes: Sequence[Recipe]) -> None:
    """Raise UserError unless the prepared folders that recipes name are complete."""
    for source in {recipe.data.source for recipe in recipes} - set(GENERATED):
        Prepared.open(source).check()


def _generate(parent: Path, name: str) -> None:
    """Prepare generated sentences or documents under the corpus's name."""
    documents = name == "europarl-doc"
    texts = parent / f"{name}.text"
    # Leftovers of a killed call.
    remove_partials(texts)
    splits: dict[str, list[TextPair]] = {}
    for split, count in _SAMPLE.items():
        if split.endswith(".long") and not documents:
            continue
        files = TextPair(texts / f"{split}.en", texts / f"{split}.de", documents)
        if not files.target.is_file():
            lengths = (12, 20) if split.endswith(".long") else (1, 5) if documents else (1, 1)
            pairs = sample.documents(0, count, lengths, split=_PARTS[split])
            write_documents(files.source, files.target, pairs, marked=documents)
        splits[split] = [files]
    prepare(parent / name, splits, vocab_size=_GENERATED_VOCABULARY)
