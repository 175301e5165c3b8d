"""The language-model benchmark still runs; its numbers are not looked at."""

import json
import lzma
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from benchmarks import (  # noqa: E402  # after the checks for the packages
    language_model,
    language_model_data,
    language_model_plot,
    language_model_speed,
)
from reluformer.hf.layers import layer_attentions  # noqa: E402


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder of the data script, from a text of two documents repeated."""
    text = "<d>\nThe house is small.\nIt is red.\n<d>\nA tree is green and tall.\n" * 150
    for name in ("train", "dev"):
        (tmp_path / f"{name}.xz").write_bytes(lzma.compress(text.encode()))
    arguments = ["--out", str(tmp_path / "lm"), "--vocabulary", "300", "--tokens", "0.002"]
    files = ["--train", str(tmp_path / "train.xz"), "--dev", str(tmp_path / "dev.xz")]
    language_model_data.main([*arguments, *files])
    return tmp_path / "lm"


def test_ids_are_those_of_the_tokenizer(data: Path) -> None:
    ids = language_model_data.read_ids(data / "dev.u16.xz")
    tokenizer = language_model_data.Tokenizer.load(data / "tokenizer.json")
    first = ids[: int(np.argmax(ids == 2))]
    assert tokenizer.decode_document(first.tolist()) == ["The house is small.", "It is red."]
    assert len(language_model_data.read_ids(data / "train.u16.xz")) == 2000


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["normalised_relu", "sdpa"])
def test_a_tiny_training_run(data: Path, tmp_path: Path, attention: str) -> None:
    out = tmp_path / "out.json"
    arguments = ["train", "--tiny", "--steps", "4", "--attention", attention]
    options = {} if attention == "sdpa" else {"power": 8}
    arguments += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    language_model.main([*arguments, "--data", str(data), "--out", str(out)])
    result = json.loads(out.read_text())
    assert result["attention"] == attention and len(result["curve"]) == 4
    assert result["options"] == options
    final = result["dev"][-1]
    assert final["step"] == 4 and final["dev_loss"] < 10
    assert ("dead_rows" in final) == (attention != "sdpa")
    language_model_plot.main([str(out), str(out), "--out", str(tmp_path / "curve.svg")])
    assert (tmp_path / "curve.svg").stat().st_size > 1000


def test_the_power_reaches_every_attention(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = language_model.build(language_model.TINY, "normalised_relu", options={"power": 4})
    assert [layer.options()["power"] for layer in layer_attentions(model)] == [4, 4]
    with pytest.raises(SystemExit):
        arguments = ["train", "--attention", "sdpa", "--power", "8", "--data", str(tmp_path)]
        language_model.main([*arguments, "--out", str(tmp_path / "out.json")])
    assert "--power needs an attention of this package, got sdpa" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        language_model.main(["speed", "--power", "8", "--out", str(tmp_path / "out.json")])
    assert "speed takes no --power" in capsys.readouterr().err
    fourth = language_model_speed.build_for_speed(
        language_model.TINY, language_model_speed.FOURTH, length=16
    )
    assert [layer.options()["power"] for layer in layer_attentions(fourth)] == [4, 4]


def test_the_figure_has_the_differences_of_all_runs(tmp_path: Path) -> None:
    size = {"batch": 2, "length": 500_000}
    runs = [
        {
            "attention": attention,
            "size": size,
            "tokens": 4_000_000,
            "text_tokens": 2_500_000,
            "curve": [{"step": step, "loss": 4.0 - step + shift} for step in (1, 2)],
            "dev": [{"step": 2, "dev_loss": 2.0 + shift}],
        }
        for attention, shift in (("sdpa", 0.0), ("normalised_relu", 0.25))
    ]
    curves = [language_model_plot.points(run, "curve", "loss") for run in runs]
    assert curves[0] == {1.0: 3.0, 2.0: 2.0}
    assert language_model_plot.difference(curves[1], curves[0]) == {1.0: 0.25, 2.0: 0.25}
    source = tmp_path / "runs.json"
    source.write_text(json.dumps({"runs": runs}))
    figures = [tmp_path / "first.svg", tmp_path / "second.svg"]
    for figure in figures:
        language_model_plot.main([str(source), "--out", str(figure)])
    text = figures[0].read_text()
    assert "normalised_relu: dev 2.250" in text and text.count("text repeats") == 1
    assert figures[1].read_text() == text


@pytest.mark.slow
def test_a_tiny_speed_table(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ["speed", "--tiny", "--repetitions", "1", "--lengths", "32", "64"]
    language_model.main([*arguments, "--tokens", "64", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    names = [
        "sdpa",
        "normalised_relu",
        "normalised_relu, power 4",
        "kernel called directly",
        "relu",
    ]
    assert [row["attention"] for row in rows] == 2 * names
    assert [(row["length"], row["batch"]) for row in rows[::5]] == [(32, 2), (64, 1)]
    assert all(row["step_tokens_per_second"] > 0 and row["attention_share"] > 0 for row in rows)
    assert all(("step_speed_up" in row) == (row["attention"] != "sdpa") for row in rows)


def test_an_attention_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    step = language_model_speed.Contestant.step

    def failing(self: language_model_speed.Contestant) -> None:
        if self.attention == "sdpa":
            raise RuntimeError("no kernel\nwith details")
        step(self)

    monkeypatch.setattr(language_model_speed.Contestant, "step", failing)
    options = Namespace(tokens=32, compile=False, repetitions=1, attentions=["sdpa", "relu"])
    first, second = language_model_speed.speed_rows(language_model.TINY, 16, options)
    assert first["error"] == "RuntimeError: no kernel"
    assert second["step_tokens_per_second"] > 0 and "step_speed_up" not in second


def test_speed_ups_are_bounded_by_the_share_of_the_attention() -> None:
    softmax = {"attention": "sdpa", "step_ms": 100.0, "attention_ms": 50.0}
    relu = {"attention": "relu", "step_ms": 80.0, "attention_ms": 25.0}
    times = {"sdpa": [100.0, 110.0, 90.0], "relu": [80.0, 80.0, 90.0]}
    row = language_model_speed.compare(relu, [softmax, relu], (times, times))
    assert row["step_speed_up"] == row["prefill_speed_up"] == 1.25
    assert row["attention_speed_up"] == 2.0
    assert row["step_ceiling_as_alone"] == pytest.approx(4 / 3)
    assert row["step_ceiling_no_attention"] == 2.0
    assert language_model_speed.compare(softmax, [softmax, relu], (times, times)) == softmax


def test_without_data_the_command_says_so(tmp_path: Path) -> None:
    with pytest.raises(language_model_data.UserError, match=r"--data must hold train\.u16\.xz"):
        language_model_data.read_ids(tmp_path / "train.u16.xz")
