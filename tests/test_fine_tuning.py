"""The commands of docs/fine-tuning.md, as written, with a tiny model as the shipped one."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from reluformer import shipped
from reluformer.checkpoint import load_run
from reluformer.cli import app
from reluformer.config.recipe import load_recipe
from reluformer.quantise import quantise_run
from tests.serve.tiny import tiny_model

PAGE = Path(__file__).resolve().parents[1] / "docs" / "fine-tuning.md"
# Shape of the tiny model, and a short run.
SETTINGS = (
    "model.width=16 model.heads=2 model.encoder_layers=2 model.decoder_layers=2 model.slots=16 "
    "model.attention.power=1 model.attention.threshold_init=0.0 train.steps=2 train.warmup=1 "
    "train.dev_every=2 train.checkpoint_every=2"
)


def run(command: str) -> None:
    """Run one line of a shell block in this process, with its redirections."""
    words = shlex.split(command)
    text, out = None, None
    while len(words) > 2 and words[-2] in "<>":
        sign, file = words[-2:]
        text, out = (Path(file).read_bytes(), out) if sign == "<" else (text, Path(file))
        words = words[:-2]
    if words[1] == "train":
        words += [part for setting in SETTINGS.split() for part in ("--set", setting)]
    done = CliRunner().invoke(app, words[1:], input=text)
    assert done.exit_code == 0, done.output
    if out is not None:
        out.write_bytes(done.stdout_bytes)


@pytest.mark.slow
def test_the_page_can_be_typed_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model(tmp_path / "float32")
    quantise_run(tmp_path / "float32", tmp_path / "int8")
    monkeypatch.setattr(shipped, "SHIPPED_FOLDER", tmp_path / "int8")
    monkeypatch.chdir(tmp_path)
    for language, code in re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL):
        if language == "python":
            exec(code.replace("train=400", "train=10"), {})
        else:
            for line in code.replace("\\\n", " ").splitlines():
                run(line)
    start, tuned = (load_run(folder).model for folder in ("int8", "runs/mine"))
    weights = [model.target_embedding.weight for model in (start, tuned)]
    difference = (weights[0] - weights[1]).abs().max()
    # Two steps of a small learning rate change the weights, and little.
    assert 0 < difference < 1e-2
    lines = [Path(name).read_text("utf-8").count("\n") for name in ("before.de", "after.de")]
    assert lines == [Path("text/test.en").read_text("utf-8").count("\n")] * 2


def test_the_recipe_has_the_shape_of_the_shipped_model() -> None:
    recipe, stored = load_recipe("fine-tune"), load_run(shipped.SHIPPED_FOLDER)
    ours, theirs = recipe.model_with(stored.tokenizer.vocab_size), stored.model.config
    assert {**vars(ours), "dropout": 0} == {**vars(theirs), "dropout": 0}
