"""Folders that were built to harm: refused in one sentence, at once, in little memory."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reluformer.checkpoint import load_run
from reluformer.config.recipe import load_recipe, load_stored_recipe
from reluformer.data.prepare import Prepared
from reluformer.data.tokenizer import Tokenizer
from reluformer.errors import UserError
from reluformer.train import run_dir
from tests.fuzz.conftest import edit_json, refusal

HUGE = 10**9
LAUGHS = "a0: &a0 [x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30)
)
PADDING = {
    "strategy": {"Fixed": 100_000},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "x",
}
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 1000,
    "pair": [],
    "special_tokens": {},
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("encoder_layers", HUGE),
        ("decoder_layers", HUGE),
        ("width", HUGE),
        ("slots", HUGE),
        ("slots", 2**62),
        ("vocabulary", 10**12),
        ("heads", 4),
        ("norm", "Pre"),
        ("positions", "rope"),
        ("pad_id", HUGE),
        ("memory_options", {"value_std": -1}),
        ("attention", {"options": {"gamma": "x"}}),
        ("attention", {"power": 10**400}),
        ("memory", "sigma_moe"),
    ],
)
def test_settings_that_do_not_fit_the_weights(folder: Path, name: str, value: Any) -> None:
    edit_json(folder / "model/config.json", lambda d: d["config"].update({name: value}))
    assert refusal(lambda: load_run(folder / "model")) or name == "heads"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "recipe.yaml"])
def test_a_fifo_in_place_of_a_file(folder: Path, name: str) -> None:
    (folder / "model" / name).unlink()
    os.mkfifo(folder / "model" / name)
    assert refusal(lambda: load_run(folder / "model"))


@pytest.mark.parametrize("name", ["tokenizer.json", "recipe.yaml"])
def test_a_device_in_place_of_a_file(folder: Path, name: str) -> None:
    (folder / "model" / name).unlink()
    (folder / "model" / name).symlink_to("/dev/zero")
    message = refusal(lambda: load_run(folder / "model"))
    assert message is not None and "is not a regular file" in message


@pytest.mark.parametrize(
    "text",
    [
        LAUGHS,
        "data: &x {source: *x}\n",
        "a: &a {b: 1}\nc: {<<: [" + "*a, " * 20_000 + "*a]}\n",
        "[" * 10_000,
        "{a: " * 10_000,
        "data: " * 5000,
        "train: {steps: " + "9" * 5000 + "}",
        "train: {steps: 0x" + "f" * 5000 + "}",
        "data: 2026-99-99",
        "data: !!timestamp x",
        "data: !!bool x",
        "data: !!int ''",
        "data: !!python/object/apply:os.system [id]",
        "? [a, b]\n: c",
        "? {a: b}\n: c",
        "1: 2",
        "x" * 10**6,
        "\0",
        "a: \ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
        "",
        "- 1",
        "train: {lr: 1e999}",
        "train: null",
        "model: 3",
        "decode: {length_penalty: 1e308}",
    ],
)
def test_recipes(folder: Path, text: str) -> None:
    path = folder / "model/recipe.yaml"
    path.write_text(text, encoding="utf-8")
    for load in (load_recipe, load_stored_recipe):
        assert refusal(lambda load=load: load(path))
    assert refusal(lambda: load_run(folder / "model"))


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("padding", PADDING),
        ("truncation", {"max_length": 1, "strategy": "LongestFirst", "stride": 0}),
        ("normalizer", {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10_000}),
        ("normalizer", {"type": "Prepend", "prepend": "x" * 10_000}),
        ("post_processor", TEMPLATE),
        ("pre_tokenizer", None),
        ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Removed"}),
        ("decoder", {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10_000}),
        ("added_tokens", [{"id": 5, "content": "a", "special": True}]),
        ("unknown", 1),
        ("model", []),
    ],
)
def test_tokenizers_of_another_structure(folder: Path, part: str, value: Any) -> None:
    path = folder / "model/tokenizer.json"
    edit_json(path, lambda d: d.update({part: value}))
    message = refusal(lambda: Tokenizer.load(path))
    assert message is not None and "is not a tokenizer of this package" in message


def _shift(model: dict[str, Any]) -> None:
    model["vocab"] = {token: i + 1 for token, i in model["vocab"].items()}


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.update(dropout=0.5),
        lambda model: model.update(vocab={}),
        lambda model: model.update(vocab={str(i): i for i in range(2**18 + 1)}),
        lambda model: model["vocab"].update({"x" * 1000: len(model["vocab"])}),
        lambda model: model["vocab"].update(a=2**70),
        lambda model: model["vocab"].pop("a"),
        lambda model: model.update(merges=[["a", "nothing"]]),
        lambda model: model.update(merges=[[1, 2]]),
        lambda model: model.update(merges=None),
        lambda model: model.update(type="WordPiece"),
        _shift,
    ],
)
def test_tokenizers_with_another_vocabulary(
    folder: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    path = folder / "model/tokenizer.json"
    edit_json(path, lambda d: change(d["model"]))
    assert refusal(lambda: Tokenizer.load(path))


def test_a_repeated_key_cannot_hide_a_part_of_a_tokenizer(folder: Path) -> None:
    path = folder / "model/tokenizer.json"
    text = path.read_text(encoding="utf-8").replace(
        '"padding": null', f'"padding": {json.dumps(PADDING)}, "padding": null'
    )
    path.write_text(text, encoding="utf-8")
    message = refusal(lambda: Tokenizer.load(path))
    assert message is not None and "repeated key" in message


@pytest.mark.parametrize(
    "text", ["[" * 10**5, '{"a": ' * 10**5, "9" * 10**5, '{"format": ' + "9" * 5000 + "}", "null"]
)
@pytest.mark.parametrize(
    "name", ["model/config.json", "model/tokenizer.json", "data/manifest.json"]
)
def test_deep_and_large_json(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    load = Prepared.open if name.startswith("data") else load_run
    assert refusal(lambda: load((folder / name).parent))


@pytest.mark.parametrize(
    "header",
    [
        struct.pack("<Q", 2**63),
        struct.pack("<Q", 100),
        b"",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 7) + b'{"a":1}',
        struct.pack("<Q", 12) + b'{"a": {}}   ',
        struct.pack("<Q", 60) + b'{"a":{"dtype":"F32","shape":[1e9],"data_offsets":[0,4]}}    ',
    ],
)
def test_weights(folder: Path, header: bytes) -> None:
    for name in ("model/model.safetensors", "run/checkpoints/step-00000005/model.safetensors"):
        (folder / name).write_bytes(header)
        assert refusal(lambda name=name: load_run(folder / name.split("/")[0]))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["splits"], None),
        (["splits"], {"train": 1}),
        (["splits"], {"../x": {"marked": True}}),
    ],
)
def test_manifests_of_prepared_folders(folder: Path, path: list[str], value: Any) -> None:
    edit_json(folder / "data/manifest.json", lambda d: d.update({path[0]: value}))
    assert refusal(lambda: Prepared.open(folder / "data"))


@pytest.mark.parametrize(
    "entry",
    [
        {"type": "O", "size": 1, "sha256": ""},
        {"type": "<u2", "size": -1, "sha256": ""},
        {"type": "<u2", "size": 2**62, "sha256": ""},
        {"type": "<u2", "sha256": ""},
        None,
    ],
)
def test_manifests_of_corpora(folder: Path, entry: Any) -> None:
    edit_json(folder / "data/dev/manifest.json", lambda d: d["files"].update(documents=entry))
    assert refusal(lambda: Prepared.open(folder / "data").corpus("dev"))


def test_offsets_outside_the_tokens(folder: Path) -> None:
    path = folder / "data/dev/source.offsets"
    path.write_bytes(struct.pack("<q", -5) + path.read_bytes()[8:])
    message = refusal(lambda: Prepared.open(folder / "data").corpus("dev"))
    assert message is not None and "do not rise" in message


def test_a_lock_that_is_a_link_does_not_touch_its_target(folder: Path) -> None:
    precious = folder / "precious"
    precious.write_text("keep")
    (folder / "run/.lock").symlink_to(precious)
    refused = pytest.raises(UserError, match="cannot be locked: it is a symbolic link")
    with refused, run_dir.locked(folder / "run"):
        pass
    assert precious.read_text() == "keep"


def test_sound_folders_load(folder: Path) -> None:
    assert load_run(folder / "model").step is None
    assert load_run(folder / "run").step == 5
    Prepared.open(folder / "data").check()
