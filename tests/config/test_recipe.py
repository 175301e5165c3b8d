"""Recipes: shipped ones, overrides, identity, and errors with field and line."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import reluformer
from reluformer import recipes
from reluformer.config.data import DataConfig
from reluformer.config.recipe import Recipe, first_difference, load_recipe, recipe_from
from reluformer.config.train import TrainConfig
from reluformer.errors import UserError

TEXT = """\
# a comment
data:
  source: reverse
model:
  width: 32
  heads: 4
  attention:
    kind: relu
train:
  steps: 10
  lr: 1e-3
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "recipe.yaml"
    file.write_text(TEXT)
    return file


@pytest.mark.parametrize("name", recipes.names())
def test_shipped_recipes_load_by_name_and_state_their_command(name: str) -> None:
    file = recipes.path(name)
    assert isinstance(load_recipe(name), Recipe)
    assert load_recipe(name) == load_recipe(file) == load_recipe(str(file))
    header = [line for line in file.read_text().splitlines() if line.startswith("#")]
    assert any(f"reluformer train {name} --out " in line for line in header)
    assert recipes.summary(name).endswith(".")


def test_recipes_are_part_of_the_package() -> None:
    assert {"document", "sentence", "tiny", "toy-reverse"} <= set(recipes.names())
    assert recipes.path("tiny").is_relative_to(Path(reluformer.__file__).parent)


def test_an_unknown_recipe_name_lists_the_shipped_ones() -> None:
    with pytest.raises(UserError) as caught:
        load_recipe("sentense")
    known = ", ".join(recipes.names())
    assert str(caught.value) == f"recipe must be one of {known}, or a YAML file, got 'sentense'"


@pytest.mark.parametrize("path", ["", ".", "../", "/"])
def test_a_folder_is_not_a_recipe(path: str) -> None:
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        load_recipe(path)


def test_the_path_of_a_missing_file_hints_at_the_shipped_name() -> None:
    with pytest.raises(UserError, match=r"^tiny.yaml does not exist; .* is called tiny$"):
        load_recipe("tiny.yaml")


def test_a_name_is_shipped_and_a_path_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny").write_text(TEXT)
    assert load_recipe("./tiny").data.source == "reverse"
    assert load_recipe("tiny") == load_recipe(recipes.path("tiny"))


def test_a_saved_recipe_loads_as_an_equal_one(path: Path) -> None:
    recipe = load_recipe(path, ["train.lr=3e-4", "model.cross_attention={kind: softmax}"])
    recipe.save(path)
    again = load_recipe(path)
    assert again == recipe and again.hash == recipe.hash
    assert again.model.attention_at("cross").kind == "softmax"


def test_overrides_are_yaml(path: Path) -> None:
    recipe = load_recipe(
        path, ["train.betas=[0.8, 0.9]", "train.clip=null", "data.generated.train=5"]
    )
    assert recipe.train.betas == (0.8, 0.9)
    assert recipe.train.clip is None
    assert recipe.train.lr == 1e-3
    assert recipe.data.generated is not None and recipe.data.generated.train == 5


@pytest.mark.parametrize("text", ["train.lr", "=3", "train..lr=1", "", "train.lr=[1"])
def test_malformed_overrides_are_refused(path: Path, text: str) -> None:
    with pytest.raises(UserError, match="--set"):
        load_recipe(path, [text])


@pytest.mark.parametrize(
    ("line", "wrong", "message"),
    [
        (5, "  widht: 32", "model.widht is not a known field; did you mean 'width'?"),
        (5, "  width: wide", "model.width must be a whole number"),
        (5, "  width: 30", "model.heads must divide width 30"),
        (5, "  vocabulary: 9", "model.vocabulary comes from the tokenizer"),
        (8, "    kind: rellu", "rellu"),
        (10, "  steps: 0", "train.steps must be at least 1, got 0"),
        (11, "  lr: -1", "train.lr must be greater than 0"),
        (11, "  lr: .inf", "train.lr must be a finite number, got inf"),
        (11, "  final: ema", "train.final ema needs train.ema"),
        (11, "  final: first", "train.final must be one of last, best, average, ema"),
        (11, "  average_last: 9\n  final: average", "train.average_last must be at most"),
        (11, "  patience: 3\n  dev_every: null", "train.patience needs train.dev_every"),
        (11, "  entropy_every: 0", "train.entropy_every must be at least 1, got 0"),
        (11, "  sample_rows: 4\n  entropy_every: 2", "train.entropy_every must be 1 when"),
        (11, "  threads: 100000", "train.threads must be at most 256, got 100000"),
        (11, "  batch_tokens: 8", "train.batch_tokens must be at least 256 to hold"),
        (
            3,
            "  source: folder\n  generated: {}",
            "data.generated must be null for a prepared folder",
        ),
        (3, "  source: copy\n  cross_documents: true", "data.cross_documents must be false"),
        (3, "  source: copy\n  mixed_lengths: true", "data.mixed_lengths needs data.unit document"),
        (3, "  source: copy\n  generated: {train: 1000000000}", "train must be at most 10000000"),
        (3, "  source: copy\n  source: reverse", "data.source is given twice, first in line 3"),
    ],
)
def test_errors_name_the_field_and_the_line(
    path: Path, line: int, wrong: str, message: str
) -> None:
    lines = TEXT.splitlines()
    lines[line - 1] = wrong
    path.write_text("\n".join(lines))
    with pytest.raises(UserError) as caught:
        load_recipe(path)
    assert message in str(caught.value)
    assert f"{path}, line " in str(caught.value)
    if "\n" not in wrong and "heads" not in message and "kind" not in wrong:
        assert str(caught.value).startswith(f"{path}, line {line}: ")


def test_errors_name_the_override(path: Path) -> None:
    with pytest.raises(UserError, match=r"^--set train.steps=0: train.steps must be at least 1"):
        load_recipe(path, ["train.steps=0"])


@pytest.mark.parametrize("text", ["a: [", "- 1", "", "a: b: c", "\tx: 1", "!!python/name:os.x 1"])
def test_broken_files_are_refused(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(UserError, match=str(path)):
        load_recipe(path)


def test_missing_and_binary_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        load_recipe(tmp_path / "nothing.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not UTF-8"):
        load_recipe(tmp_path / "binary.yaml")


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@given(st.sampled_from(dataclasses.fields(TrainConfig) + dataclasses.fields(DataConfig)), _VALUES)
def test_any_value_of_a_field_is_accepted_or_refused(
    field: "dataclasses.Field[Any]", value: Any
) -> None:
    section = "train" if field in dataclasses.fields(TrainConfig) else "data"
    values: dict[str, Any] = {"data": {"source": "copy"}, "model": {}, "train": {}}
    values[section][field.name] = value
    try:
        recipe = recipe_from(values)
    except UserError as error:
        # The error may name another field that the value contradicts.
        assert str(error).split(".")[0] in ("train", "data")
    else:
        assert recipe_from(yaml.safe_load(yaml.safe_dump(recipe.to_dict()))) == recipe


@pytest.mark.parametrize("changed", ["train.lr=1", "model.dropout=0.5", "data.max_length=9"])
def test_the_hash_depends_on_the_trained_model(path: Path, changed: str) -> None:
    first, second = load_recipe(path), load_recipe(path, [changed])
    assert first.hash != second.hash
    difference = first_difference(first, second)
    assert difference is not None and difference.startswith(changed.split("=")[0] + " is ")


@pytest.mark.parametrize("changed", ["train.keep=9", "train.log_every=7", "decode.beam=1"])
def test_the_hash_does_not_depend_on_logging_and_search(path: Path, changed: str) -> None:
    first, second = load_recipe(path), load_recipe(path, [changed])
    assert first != second
    assert first.hash == second.hash and first_difference(first, second) is None
