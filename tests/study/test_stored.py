"""Results in a folder are those of the plan, or are refused."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reluformer.data.prepare import prepare
from reluformer.data.text import TextPair
from reluformer.errors import UserError
from reluformer.study.budgets import BUDGETS
from reluformer.study.cells import Cell, Outcome
from reluformer.study.corpora import fingerprint
from reluformer.study.stored import check_data, check_outcomes, load_outcomes

TINY = BUDGETS["tiny"]
CELL = Cell("a", {"seed": 1}, recipe="tiny", settings={"model.slots": 64})
DETAIL = {
    "budget": "tiny",
    "recipe": "tiny",
    "corpus": None,
    "settings": {"model.slots": 64},
    "assignments": ["train.steps=3"],
}
OUTCOME = Outcome("a", {"seed": 1}, "finished", {}, DETAIL)


def check(outcome: Outcome, *assignments: str) -> None:
    check_outcomes([CELL], {"a": outcome}, Path("out"), TINY, assignments)


def test_results_of_the_planned_settings_are_used() -> None:
    check(OUTCOME, "train.steps=3")
    earlier = {name: value for name, value in DETAIL.items() if name != "assignments"}
    check(replace(OUTCOME, detail=earlier))


def test_a_cell_whose_start_had_diverged_is_refused_once_the_start_has_not() -> None:
    child = Cell("child", {}, parent="a")
    outcomes = {"child": Outcome("child", {}, "diverged", {}, reason="its start a diverged")}
    outcomes["a"] = replace(OUTCOME, status="diverged")
    check_outcomes([child], outcomes, Path("out"), TINY, [])
    outcomes["a"] = OUTCOME
    with pytest.raises(UserError, match="starts from is diverged there and finished here"):
        check_outcomes([child], outcomes, Path("out"), TINY, [])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"settings": {"model.slots": 32}}, "model.slots is 32 there and 64 here"),
        ({"settings": {"model.slots": 64, "train.lr": 1}}, "train.lr is 1 there and None here"),
        ({"budget": "full"}, "budget is full there and tiny here"),
        ({"assignments": []}, r"--set is \[\] there and \['train.steps=3'\] here"),
        (
            {"assignments": ["train.lr=1", "train.steps=3"]},
            r"--set is \['train.lr=1'\] there and \[\] here",
        ),
        ({"assignments": ["train.steps=3"] * 2}, "--set is .*3'.*3'. there and .*3'. here"),
        ({"corpus": "europarl-doc"}, "corpus is europarl-doc there and None here"),
    ],
)
def test_results_of_other_settings_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match="out/a holds a result of other settings: " + message):
        check(replace(OUTCOME, detail=DETAIL | change), "train.steps=3")


def test_results_of_other_data_are_refused(tmp_path: Path) -> None:
    files = TextPair(tmp_path / "en", tmp_path / "de", documents=False)
    for sentences in ("a b\n", "a c\n"):
        files.source.write_text(sentences)
        files.target.write_text(sentences)
        prepare(tmp_path / sentences[2], {"train": [files]}, vocab_size=300)
    detail = {"corpus": "europarl-sent", "data": fingerprint(tmp_path / "b")}
    for data in (detail, {"corpus": "europarl-sent"}, {"corpus": None, "data": None}):
        outcomes = {"a": replace(OUTCOME, detail=data)}
        check_data(outcomes, tmp_path, {"europarl-sent": tmp_path / "b"})
    outcomes = {"a": replace(OUTCOME, detail=detail)}
    with pytest.raises(UserError, match="a holds a result of other data than .*/c"):
        check_data(outcomes, tmp_path, {"europarl-sent": tmp_path / "c"})


def test_results_without_settings_or_in_the_wrong_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="budget is None there"):
        check(replace(OUTCOME, detail={}))
    with pytest.raises(UserError, match="labels is {} there"):
        check(replace(OUTCOME, labels={}))
    OUTCOME.save(tmp_path / "a")
    assert load_outcomes(tmp_path) == [OUTCOME]
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with pytest.raises(UserError, match="b/cell.json is the result of a"):
        load_outcomes(tmp_path)
