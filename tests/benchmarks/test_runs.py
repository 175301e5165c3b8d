"""A study trains runs side by side, goes on where time stopped it, and compares translations."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import runs, tuned
from reluformer.config.recipe import load_recipe

ROOT = Path(runs.__file__).parents[1]
STUDIES = sorted((ROOT / "studies").glob("*.yaml"))
SMALL = {
    "data.generated.train": 60, "data.generated.dev": 4, "model.width": 16, "model.heads": 2,
    "model.slots": 16, "model.encoder_layers": 1, "model.decoder_layers": 1, "train.steps": 2,
    "train.log_every": 1, "train.dev_every": 2, "train.bleu_every": None, "train.device": "cpu",
    "train.checkpoint_every": 2, "train.compile": False,
}  # fmt: skip


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_setting_of_a_study_is_one(path: Path) -> None:
    study = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert study["runs"]
    for values in study["runs"].values():
        assigned = [*runs.settings(study.get("common")), *runs.settings(values)]
        load_recipe(study["recipe"], assigned)


def test_runs_are_trained_scored_and_resumed(tmp_path: Path) -> None:
    study = {
        "recipe": "toy-reverse",
        "common": SMALL,
        "runs": {"softmax": {"model.attention.kind": "softmax"}, "relu": None},
    }
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study), encoding="utf-8")
    for side in ("source", "target"):
        for name in ("test", "test.long"):
            text = "<d>\na b\nc d e\n<d>\nf g\n"
            (tmp_path / f"{name}.{side}.txt").write_text(text, encoding="utf-8")

    def command(*more: str) -> dict[str, Any]:
        subprocess.run(
            [sys.executable, "-m", "benchmarks.runs", str(tmp_path / "study.yaml"), "--folder",
             str(tmp_path / "runs"), "--out", str(tmp_path / "out.json"), "--jobs", "2", *more],
            cwd=ROOT, check=True, capture_output=True,
        )  # fmt: skip
        found: dict[str, Any] = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
        return found

    sets = [str(tmp_path / "test"), str(tmp_path / "test.long")]
    stopped = command("--minutes", "0", "--dev", sets[0], "--test", *sets)
    assert [run["curve"] for run in stopped["runs"].values()] == [[], []]
    assert stopped["scores"] is None
    report = command("--documents", "--dev", sets[0], "--test", *sets)
    for run in report["runs"].values():
        assert [point["step"] for point in run["curve"]] == [0, 1, 2]
        assert run["curve"][-1]["dev"]["nll"] > 0
    assert "signature" in json.dumps(report["scores"])
    assert report["scores"]["tuned"]["relu"]["length penalty"] in tuned.PENALTIES
    assert runs.shown(report["scores"]).count("BLEU") == 8
    assert report["study"] == study


def test_what_failed_says_why_and_what_was_cut_does_not(tmp_path: Path) -> None:
    def python(program: str) -> list[str]:
        return [sys.executable, "-c", program]

    # The log of an earlier start is not this one's.
    (tmp_path / "silent.log").write_text("earlier\n", encoding="utf-8")
    commands = {
        "good": python("print('well')"),
        "bad": python("import sys; print('first'); sys.exit('the reason\\n')"),
        "silent": python("import sys; sys.exit(3)"),
        "a-translate": python("1 / 0"),
    }
    queue = runs.Queue(len(commands), time.monotonic() + 60)
    assert queue.run(commands, tmp_path) == ["good"]
    queue.end = time.monotonic() + 0.3
    assert queue.run({"slow": python("import time; time.sleep(60)")}, tmp_path) == []
    assert queue.failed == {
        "bad": "exit status 1: the reason",
        "silent": "exit status 3: nothing in its log",
        "a-translate": "exit status 1: ZeroDivisionError: division by zero",
    }
    attention = {"cross": {"row_sum": 1, "entropy": 0, "zeros": 0, "dead_rows": 0}}
    point = {"step": 7, "nll": 3.0, "tokens_per_second": 1e3, "attention": attention}
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "metrics.jsonl").write_text(json.dumps(point) + "\n", encoding="utf-8")
    report = {"runs": {name: runs.outcome(name, tmp_path, queue) for name in ("a", "bad", "slow")}}
    assert json.loads(runs.laid_out(report))["runs"]["bad"]["failed"] == queue.failed["bad"]
    lines = runs.table(report).splitlines()
    assert lines[0].split()[:3] == ["a", "step", "7"]
    assert lines[1] == f"    failed: {queue.failed['a-translate']}"
    assert lines[2].split() == ["bad", "nothing", "logged"]
    assert lines[3] == "    failed: exit status 1: the reason"
    assert lines[4].split() == ["slow", "nothing", "logged"] and len(lines) == 6


def test_a_part_of_dev_is_spread_over_it_or_its_beginning(tmp_path: Path) -> None:
    for side in ("source", "target"):
        text = "".join(f"{side} {number}\n" for number in range(10))
        (tmp_path / f"dev.{side}.txt").write_text(text, encoding="utf-8")
    prefix = str(tmp_path / "dev")
    sources, references = tuned.part(prefix, 3, documents=False)
    assert sources == ["source 0", "source 3", "source 6", "source 9"]
    assert references[1] == "target 3"
    assert tuned.part(prefix, 3, documents=True)[0] == ["source 0", "source 1", "source 2"]
    assert tuned.bleu(["<d>", "a b c d e"], ["<d>", "a b c d e"]) == pytest.approx(100)
