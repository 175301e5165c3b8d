"""The interactive map view and the command around it."""

import base64
import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from reluformer.checkpoint import load_run
from reluformer.cli.inspection import inspect
from reluformer.config.recipe import load_recipe
from reluformer.errors import UserError
from reluformer.inspection.maps import SITES, _site, map_page
from reluformer.inspection.texts import dev_batch, text_batch
from reluformer.train import train

SMALL = [
    "data.generated.train=60", "data.generated.dev=4", "model.width=16", "model.heads=2",
    "model.slots=16", "model.encoder_layers=1", "model.decoder_layers=1", "train.steps=2",
    "train.warmup=1", "train.log_every=2", "train.dev_every=2", "train.bleu_every=null",
]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    for kind in ("relu", "softmax"):
        recipe = load_recipe("toy-reverse", [*SMALL, f"model.attention.kind={kind}"])
        train(recipe, folder / kind, quiet=True)
    return [folder / "relu", folder / "softmax"]


def test_weights_survive_and_zeros_stay_exact() -> None:
    weights = torch.rand(2, 3, 4, 5)
    weights[0, 1, 2] = 0
    weights[1, 0, 0, 0] = 1e-9
    weights[1, 1, 1, 1] = -0.7
    packed = _site(weights)
    steps = np.frombuffer(base64.b64decode(packed["weights"]), "<i2").reshape(2, 3, 4, 5)
    restored = steps * np.array(packed["scales"])[..., None, None] / 32767
    np.testing.assert_allclose(restored, weights.numpy(), atol=5e-5)
    assert ((steps == 0) == (weights == 0).numpy()).all()
    assert packed["row_sums"][0][1][2] == 0


def test_a_page_shows_two_models(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("a b c\n<d>\nd e </script> f\n", encoding="utf-8")
    page = tmp_path / "maps.html"
    inspect(runs[0], text=tmp_path / "text", maps=page, against=runs[1], json_=True, top="1,50")
    printed = json.loads(capsys.readouterr().out)
    assert printed["percents"] == [1, 50] and printed["examples"] == 2
    data = _data(page.read_text(encoding="utf-8"))
    assert [model["name"] for model in data["models"]] == ["relu", "softmax"]
    for model in data["models"]:
        assert len(model["texts"]) == 2
        text = model["texts"][0]
        for site in SITES:
            rows = text["source"] if site == "encoder" else text["target"]
            columns = text["target"] if site == "decoder" else text["source"]
            assert text["sites"][site]["shape"][-2:] == [len(rows), len(columns)]
    softmax = data["models"][1]["texts"][0]["sites"]["cross"]["row_sums"][0][0]
    assert softmax == pytest.approx([1.0] * len(softmax), abs=1e-3)
    assert data["models"][0]["texts"][0]["target"] == data["models"][1]["texts"][0]["target"]


def test_dev_is_the_default_text(runs: list[Path], tmp_path: Path) -> None:
    inspect(runs[0], examples=2, maps=tmp_path / "maps.html", json_=True)
    assert _data((tmp_path / "maps.html").read_text(encoding="utf-8"))["models"][0]["texts"]


def test_no_more_examples_than_asked_for_come_from_several_batches(runs: list[Path]) -> None:
    run = load_run(runs[0])
    recipe = replace(run.recipe, train=replace(run.recipe.train, batch_tokens=32))
    sizes = [len(dev_batch(run._replace(recipe=recipe), most)["source"]) for most in (1, 3, 9)]
    assert sizes == [1, 3, 4]


def test_examples_of_a_text_fit_into_memory(
    runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_text("a b c\nd e\nf\n", encoding="utf-8")
    run = load_run(runs[0])
    sizes = []
    for elements in (2**28, 2):
        monkeypatch.setattr("reluformer.inspection.texts._MAP_ELEMENTS", elements)
        sizes.append(len(text_batch(run, tmp_path / "text", 9)["source"]))
    assert sizes == [3, 1]


def test_mistakes_are_named(runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="top must be numbers above 0"):
        inspect(runs[0], top="0,x")
    with pytest.raises(UserError, match="which needs --maps"):
        inspect(runs[0], against=runs[1])
    with pytest.raises(UserError, match="examples must be at least 1, got 0"):
        inspect(runs[0], examples=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="device is cuda, but torch finds no GPU"):
        inspect(runs[0], device="cuda")


def test_the_script_is_valid(tmp_path: Path) -> None:
    page = map_page([{"name": "a <b>", "texts": []}])
    assert "a &lt;b&gt;" in page and "src=" not in page and "href=" not in page
    script = page.rsplit("<script>", 1)[1].split("</script>")[0]
    (tmp_path / "map.js").write_text(script, encoding="utf-8")
    try:
        subprocess.run(["node", "--check", str(tmp_path / "map.js")], check=True)
    except FileNotFoundError:
        pytest.skip("node is not installed")


def test_texts_cannot_end_or_extend_the_script_element() -> None:
    model = {"name": "m", "texts": [{"name": "</script> <!--<script>"}]}
    page = map_page([model])
    assert page.count("</script>") == 2 and "<!--" not in page
    assert _data(page) == {"models": [model]}


def _data(page: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    found: dict[str, Any] = json.loads(match[1])
    return found
