"""Cells, outcomes, groups and verdicts."""

import math
from pathlib import Path

import pytest

from reluformer.config.recipe import load_recipe
from reluformer.study.budgets import BUDGETS, Budget
from reluformer.study.cells import Cell, Outcome, group, load_outcome, summarise
from reluformer.study.definition import Plan
from reluformer.study.estimate import training_seconds
from reluformer.study.execute import Job, recipe_of
from reluformer.study.findings import combine, decide
from reluformer.study.registry import STUDIES
from reluformer.study.variants import ATTENTION_SETTINGS, best_rate, sentence_cell, tuned_cells
from reluformer.train.requirements import estimate


def outcome(name: str, seed: int = 1, status: str = "finished", **values: float) -> Outcome:
    return Outcome(name, {"kind": name, "seed": seed}, status, values)  # type: ignore[arg-type]


def test_outcomes_survive_the_disk(tmp_path: Path) -> None:
    saved = Outcome("a", {"seed": 1}, "diverged", {"bleu": 1.5}, {"x": [1]}, "why", 2.0, 1.0)
    assert load_outcome(tmp_path) is None
    saved.save(tmp_path)
    assert load_outcome(tmp_path) == saved


def test_summaries_leave_out_diverged_and_unmeasured_cells() -> None:
    outcomes = [outcome("a", 1, bleu=10.0), outcome("a", 2, bleu=12.0), outcome("a", 3)]
    outcomes.append(outcome("a", 4, "diverged", bleu=99.0))
    found = summarise(outcomes, "bleu")
    assert (found.mean, found.seeds) == (11.0, 2) and found.spread == pytest.approx(2**0.5)
    assert math.isnan(summarise([], "bleu").mean)
    assert list(group([*outcomes, outcome("b")], "kind")) == [("a",), ("b",)]


@pytest.mark.parametrize(
    ("value", "state"),
    [
        (1.0, "holds"),
        (0.3, "holds partly"),
        (-1.0, "does not hold here"),
        (math.nan, "not measured"),
    ],
)
def test_verdicts_follow_their_rule(value: float, state: str) -> None:
    found = decide("c", value, holds=0.5, partly=0.0, unit="BLEU", rule="r")
    assert found.state == state


@pytest.mark.parametrize(
    ("value", "number"),
    [(0.5, "+0.50 BLEU"), (0.4996, "+0.4996 BLEU"), (0.504, "+0.50 BLEU"), (1e-5, "+0.00001 BLEU")],
)
def test_numbers_agree_with_their_verdict(value: float, number: str) -> None:
    assert decide("c", value, holds=0.5, partly=0.0, unit="BLEU", rule="r").number == number


@pytest.mark.parametrize(
    ("parts", "state"),
    [
        ([True, True], "holds"),
        ([True, False], "holds partly"),
        ([False], "does not hold here"),
        ([True, None], "not measured"),
        ([], "not measured"),
    ],
)
def test_conditions_combine(parts: list[bool | None], state: str) -> None:
    assert combine("c", parts, "n", "r").state == state


def test_plans_name_a_training_once() -> None:
    """Cells of different studies with one name are the same training."""
    for budget in BUDGETS.values():
        cells: dict[str, Cell] = {}
        for study in STUDIES.values():
            planned = study.plan(Plan(budget))
            assert planned, study.name
            for cell in planned:
                first = cells.setdefault(cell.name, cell)
                assert (first.recipe, first.settings, first.parent) == (
                    cell.recipe,
                    cell.settings,
                    cell.parent,
                )
            for cell in planned:
                assert cell.parent is None or cell.parent in cells, cell.name


def test_seeds_are_planned_at_the_best_rate() -> None:
    plan = Plan(BUDGETS["full"])
    first = tuned_cells(plan, "softmax", (1, 2, 3))
    assert len(first) == 3 and best_rate(plan, "softmax") is None
    losses = dict(zip([cell.name for cell in first], (1.8, 1.7, 1.9), strict=True))
    outcomes = {name: outcome(name, dev_nll=loss) for name, loss in losses.items()}
    plan = Plan(BUDGETS["full"], outcomes)
    assert best_rate(plan, "softmax") == 2e-3
    names = {cell.name for cell in tuned_cells(plan, "softmax", (1, 2, 3))}
    assert names == set(losses) | {
        sentence_cell(plan.budget, attention="softmax", seed=seed).name for seed in (2, 3)
    }


def test_cells_side_by_side_are_of_different_attentions() -> None:
    planned = [
        cell.labels["attention"] for cell in STUDIES["attention"].plan(Plan(BUDGETS["full"]))
    ]
    assert planned[: len(ATTENTION_SETTINGS)] == list(ATTENTION_SETTINGS)


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=lambda budget: budget.name)
def test_every_training_has_a_recipe(budget: Budget, tmp_path: Path) -> None:
    """Settings that no recipe has, or that exclude each other, are refused."""
    for study in STUDIES.values():
        for cell in study.plan(Plan(budget)):
            if cell.work == "train":
                recipe = recipe_of(Job(cell, tmp_path, budget, tmp_path, (), ()))
                assert recipe.train.seed == cell.labels["seed"]
                assert training_seconds(recipe, 10_000, "cpu") > 0


@pytest.mark.parametrize(
    ("recipe", "vocabulary", "settings", "measured"),
    [
        ("sentence", 10_000, {"batch_tokens": 4096}, 240),
        ("tiny", 1000, {"width": 32, "slots": 64}, 12_500),
        ("tiny", 1000, {"width": 128, "slots": 256}, 4900),
    ],
)
def test_the_time_on_a_cpu_is_near_what_was_measured(
    recipe: str, vocabulary: int, settings: dict[str, int], measured: float
) -> None:
    """Target tokens per second of one core of an AMD EPYC."""
    parts = {"batch_tokens": "train", "width": "model", "slots": "model"}
    assigned = [f"{parts[name]}.{name}={value}" for name, value in settings.items()]
    loaded = load_recipe(recipe, assigned)
    tokens = 0.85 * loaded.train.steps * loaded.train.batch_tokens
    speed = tokens / training_seconds(loaded, vocabulary, "cpu")
    assert measured / 1.5 < speed < 1.5 * measured


def test_short_trainings_fit_a_gpu_of_8_gb(tmp_path: Path) -> None:
    budget = BUDGETS["short"]
    for study in STUDIES.values():
        for cell in study.plan(Plan(budget)):
            if cell.work == "train":
                recipe = recipe_of(Job(cell, tmp_path, budget, tmp_path, (), ()))
                vocabulary = 30_000 if cell.corpus == "europarl-doc" else 10_000
                assert estimate(recipe, vocabulary).memory_bytes < 6e9
                # A captured graph has its own memory, beside that of the steps before it.
                assert recipe.train.graphs is False
