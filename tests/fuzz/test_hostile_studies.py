"""Damaged files of studies, runs and benchmarks are refused in one sentence."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from reluformer.bench.report import Report
from reluformer.report.gather import gather
from reluformer.study.cells import load_outcome
from reluformer.study.record import StudyRecord
from reluformer.study.registry import study_from_file
from tests.fuzz.conftest import refusal
from tests.fuzz.test_hostile_folders import LAUGHS

OUTCOME = {"name": "a", "labels": {}, "status": "finished", "values": {"bleu": 1.0}}
RECORD = {
    "study": "ffn",
    "budget": "tiny",
    "date": "2026-11-16",
    "command": "",
    "commit": None,
    "machine": {},
    "folder": "x",
    "planned": [],
    "outcomes": [OUTCOME],
}
COMPARISON = {
    "test": "t",
    "level": "sentence",
    "system": {},
    "baseline": {},
    "seeds": 1,
    "difference": 0.0,
    "interval": [0.0, 1.0],
    "p_value": 1.0,
    "signature": "",
}
BROKEN = ["", "[", "[" * 10**5, '{"a": ' * 10**5, "null", "3", "{}", '{"a": 1, "a": 2}', "\ud800"]


@pytest.mark.parametrize("text", BROKEN)
@pytest.mark.parametrize("reader", [StudyRecord.load, Report.load, lambda p: gather([p])])
def test_broken_json(tmp_path: Path, text: str, reader: Any) -> None:
    path = tmp_path / "x.study.json"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    assert refusal(lambda: reader(path))


@pytest.mark.parametrize("reader", [StudyRecord.load, Report.load, study_from_file])
def test_a_folder_and_binary_files(tmp_path: Path, reader: Any) -> None:
    assert refusal(lambda: reader(tmp_path))
    (tmp_path / "x").write_bytes(bytes(range(256)) * 10)
    assert refusal(lambda: reader(tmp_path / "x"))


@pytest.mark.parametrize("reader", [StudyRecord.load, Report.load])
def test_a_fifo(tmp_path: Path, reader: Any) -> None:
    os.mkfifo(tmp_path / "x")
    assert refusal(lambda: reader(tmp_path / "x"))


@pytest.mark.parametrize(
    "change",
    [
        {"outcomes": 3},
        {"outcomes": [3]},
        {"outcomes": [{**OUTCOME, "values": {"bleu": "many"}}]},
        {"outcomes": [{**OUTCOME, "values": [1]}]},
        {"outcomes": [{**OUTCOME, "status": "lost"}]},
        {"outcomes": [{**OUTCOME, "other": 1}]},
        {"comparisons": [{**COMPARISON, "interval": [1]}]},
        {"comparisons": [{**COMPARISON, "interval": "ab"}]},
        {"machine": []},
        {"planned": "abc"},
        {"study": None},
    ],
)
def test_records_of_studies(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "x.study.json"
    path.write_text(json.dumps({**RECORD, "comparisons": [COMPARISON]}))
    StudyRecord.load(path)
    path.write_text(json.dumps({**RECORD, **change}))
    message = refusal(lambda: gather([tmp_path]))
    assert message is not None and "is no record of a study" in message


@pytest.mark.parametrize("text", ["{", "[]", '{"name": 3}', json.dumps({**OUTCOME, "values": 1})])
def test_cells(tmp_path: Path, text: str) -> None:
    (tmp_path / "cell.json").write_text(text)
    message = refusal(lambda: load_outcome(tmp_path))
    assert message is not None and "cell.json is damaged" in message


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("metrics.jsonl", '{"nll": "x", "tokens": 1, "step": 1}\n'),
        ("metrics.jsonl", '{"nll": 1.0}\n'),
        ("metrics.jsonl", "3\n"),
        ("metrics.jsonl", "[" * 10**5 + "\n"),
        ("metrics.jsonl", '{"nll": 1, "tokens": 1, "step": 1, "dev": 5}\n'),
        ("run.json", '{"starts": [3]}'),
        ("run.json", '{"starts": 3}'),
        ("run.json", "[]"),
    ],
)
def test_reports_of_runs(folder: Path, name: str, text: str) -> None:
    gather([folder / "run"])
    (folder / "run" / name).write_text(text)
    assert refusal(lambda: gather([folder / "run"]))


@pytest.mark.parametrize(
    "text",
    [
        LAUGHS,
        "recipe: &x {runs: *x}\n",
        "[" * 10_000,
        "recipe: tiny",
        "recipe: 3\nruns: {a: {}}",
        "recipe: tiny\nruns: {}",
        "recipe: tiny\nruns: 3",
        "recipe: tiny\nruns: [a]",
        "recipe: tiny\nruns: {a: [x]}",
        "recipe: tiny\ncommon: 3\nruns: {a: {}}",
        "recipe: tiny\nruns: {1: {}}",
        "recipe: tiny\nruns: {'../../outside': {}}",
        "recipe: tiny\nruns: {'a/b': {}}",
        "recipe: tiny\nruns: {'': {}}",
    ],
)
def test_studies_described_by_a_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("recipe: tiny\nruns: {a: &a {train.lr: 1}, b: {<<: *a, train.lr: 2}}\n")
    study_from_file(path)
    path.write_text(text)
    assert refusal(lambda: study_from_file(path))
