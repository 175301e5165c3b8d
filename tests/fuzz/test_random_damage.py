"""Random damage to every file of a model, run or prepared folder: loaded or refused in a sentence.

A few hundred cases in `make test`, 10,000 in `make test-all`.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reluformer.checkpoint import load_run
from reluformer.config.recipe import load_stored_recipe
from reluformer.data.prepare import Prepared
from reluformer.data.tokenizer import Tokenizer
from tests.fuzz.conftest import refusal

# The profile of `make test-all` has 100 examples for each test.
EXAMPLES = 40 if settings().max_examples < 100 else 1250

Load = Callable[[Path], object]
FILES: list[tuple[str, Load]] = [
    ("model/config.json", lambda path: load_run(path.parent)),
    ("model/recipe.yaml", load_stored_recipe),
    ("model/tokenizer.json", lambda path: Tokenizer.load(path).encode("the cat  sat")),
    ("run/checkpoints/step-00000005/state.json", lambda path: load_run(path.parent)),
    ("data/manifest.json", lambda path: Prepared.open(path.parent).check()),
    ("data/dev/manifest.json", lambda path: Prepared.open(path.parent.parent).corpus("dev")),
]
BINARY: list[tuple[str, Load]] = [
    ("model/model.safetensors", lambda path: load_run(path.parent)),
    ("data/dev/source.offsets", lambda path: Prepared.open(path.parent.parent).corpus("dev")),
]

NUMBERS = st.sampled_from([0, -1, 1, 2, 3, 2**31, 2**63, 10**9, 10**30, 1e308, -0.5, 1e-320])
SCALARS = st.none() | st.booleans() | NUMBERS | st.integers() | st.text(max_size=20) | st.floats()
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
ANY_CASE = settings(
    max_examples=EXAMPLES,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def _containers(value: Any) -> list[Any]:
    """All lists and objects inside `value`, itself included."""
    if not isinstance(value, (dict, list)):
        return []
    children = value.values() if isinstance(value, dict) else value
    return [value, *(inner for child in children for inner in _containers(child))]


def _change(values: Any, data: st.DataObject) -> None:
    """Replace, delete or add one entry of one list or object inside `values`."""
    chosen = data.draw(st.sampled_from([c for c in _containers(values) if c]))
    keys = list(chosen)[:200] if isinstance(chosen, dict) else range(min(len(chosen), 200))
    key = data.draw(st.sampled_from(list(keys)))
    action = data.draw(st.sampled_from(["replace", "replace", "delete", "add"]))
    if action == "delete":
        del chosen[key]
    elif action == "add" and isinstance(chosen, dict):
        chosen[data.draw(st.text(max_size=8))] = data.draw(VALUES)
    else:
        chosen[key] = data.draw(VALUES)


@pytest.mark.parametrize(("name", "load"), FILES, ids=[name for name, _ in FILES])
@given(data=st.data())
@ANY_CASE
def test_changed_values(sound_folder: Path, folder: Path, name: str, load: Load, data) -> None:
    text = (sound_folder / name).read_text(encoding="utf-8")
    values = yaml.safe_load(text) if name.endswith(".yaml") else json.loads(text)
    for _ in range(data.draw(st.integers(1, 3))):
        _change(values, data)
    dump = yaml.safe_dump if name.endswith(".yaml") else json.dumps
    (folder / name).write_text(dump(values), encoding="utf-8")
    refusal(lambda: load(folder / name))


@pytest.mark.parametrize(("name", "load"), BINARY, ids=[name for name, _ in BINARY])
@given(data=st.data())
@ANY_CASE
def test_changed_bytes(sound_folder: Path, folder: Path, name: str, load: Load, data) -> None:
    content = bytearray((sound_folder / name).read_bytes())
    # The first bytes hold lengths and names.
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, min(len(content), 2000) - 1))
        content[place] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    (folder / name).write_bytes(content)
    refusal(lambda: load(folder / name))
    shutil.copy(sound_folder / name, folder / name)
