"""Metrics file, statistics of attention, and progress lines."""

import io
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from reluformer.errors import UserError
from reluformer.model.records import AttentionRecord
from reluformer.ops.stats import summarise
from reluformer.processes import Processes
from reluformer.train import train
from reluformer.train.attention_stats import Meter, attention_statistics
from reluformer.train.metrics import Metrics
from reluformer.train.progress import reporter
from tests.train.tiny import tiny

ALONE = Processes(0, 1, torch.device("cpu"))


def test_lines_after_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": 0.1 * step}) + "\n" for step in range(5)]
    path.write_text("".join(lines) + '{"step": 5, "lo')
    metrics = Metrics(path, after=3)
    metrics.write({"step": 4, "loss": 7.0})
    metrics.sync()
    assert path.read_text() == "".join(lines[:4]) + '{"step": 4, "loss": 7.0}\n'


def test_an_incomplete_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    Metrics(path, after=2)
    assert path.read_text() == '{"step": 1}\n'


def test_a_missing_tensorboard_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
    with pytest.raises(UserError, match=r"train.tensorboard is true, but .* reluformer\[track\]"):
        Metrics(tmp_path / "metrics.jsonl", after=0, tensorboard=True)


def test_tensorboard_gets_every_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Board:
        def __init__(self, folder: str, purge_step: int) -> None:
            self.opened, self.seen = (folder, purge_step), []

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.seen.append((name, value, step))

        def close(self) -> None:
            self.seen.append("closed")

    boards: list[Board] = []
    module = SimpleNamespace(
        SummaryWriter=lambda *a, **k: boards.append(Board(*a, **k)) or boards[0]
    )
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", module)
    metrics = Metrics(tmp_path / "metrics.jsonl", after=6, tensorboard=True)
    metrics.write({"step": 7, "loss": 2, "dev": {"nll": 0.5}, "note": "words"})
    metrics.close()
    assert boards[0].opened == (str(tmp_path / "tensorboard"), 7)
    assert boards[0].seen == [("loss", 2.0, 7), ("dev/nll", 0.5, 7), "closed"]


def test_statistics_are_means_over_real_rows() -> None:
    # The third row is padding, and the last one sees no key.
    weights = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.0] * 4, [9.0] * 4, [0.0] * 4])
    visible = torch.tensor([[True] * 4, [True, True, False, False], [True] * 4, [False] * 4])
    stats = summarise(weights.view(1, 1, 4, 4), visible)
    valid = torch.tensor([True, True, False, True]).view(1, 1, 4)
    records = [AttentionRecord("cross", layer, stats, valid, None) for layer in range(2)]
    found = attention_statistics(records, ALONE)["cross"]
    assert found.row_sum == pytest.approx(0.5)
    assert found.entropy == pytest.approx(torch.tensor(2.0).log().item() / 2)
    assert found.zeros == pytest.approx((0.5 + 1.0) / 2)
    assert found.dead_rows == pytest.approx(0.5)
    assert str(found) == "sum 0.50 H 0.35 zeros 75% dead 50.0%"
    assert attention_statistics([], ALONE) == {}


def test_the_meter_returns_means_and_resets() -> None:
    meter = Meter(ALONE)
    for step in (1.0, 3.0):
        meter.add(torch.full((5,), step), torch.tensor(10 * step), tokens=7)
    assert meter.tokens == 14
    assert meter.flush() == (2.0, 2.0, 2.0, 2.0, 2.0, 20.0)
    meter.add(torch.tensor([1.0, torch.nan, 1.0, 1.0, 1.0]), torch.tensor(1.0), tokens=1)
    assert torch.tensor(meter.flush().nll).isnan() and meter.tokens == 0


def test_plain_lines_without_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"model__attention__row_sum_init": 0.6, "data__max_length": 9}
    recipe = tiny(steps=2, dev_every=2, log_every=2, **changes)
    train(recipe, tmp_path)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("this run needs: ")
    # A letter is one id, and the end another.
    kept = "examples; sentences left out because they are too long:"
    assert re.fullmatch(rf"train: \d\d {kept} \d\d", lines[1])
    assert re.fullmatch(rf"dev: \d\d {kept} \d", lines[2])
    assert lines[3].startswith("attention at the start | cross sum 0.6")
    assert lines[4].startswith("log lines: nll ")
    assert lines[5].startswith("step 2 loss ") and " tok/s | cross sum " in lines[5]
    assert lines[6].startswith("step 2 dev nll ") and lines[6].endswith("(best)")
    assert lines[7].startswith("finished at step 2")
    train(recipe, tmp_path)
    again = f"{tmp_path} is finished already: {tmp_path / 'model'}\n"
    assert capsys.readouterr().err == again


def test_a_bar_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with reporter(9) as shown:
        shown.show("[not markup] step 1 in a:100:b")
        shown.advance(4)
    assert "[not markup] step 1 in a:100:b" in screen.getvalue() and "4/9" in screen.getvalue()
    with reporter(9, enabled=False) as silent:
        silent.show("nothing")
        silent.advance(1)
    assert "nothing" not in screen.getvalue()
