"""One setting at a time around the default attention."""

import math
from typing import Any

from reluformer.study.catalogue.tables import decimals, group_table, mean_of, percent
from reluformer.study.cells import Cell
from reluformer.study.definition import Plan, Requirement, Results, Study
from reluformer.study.findings import Findings, combine
from reluformer.study.questions import QUESTIONS
from reluformer.study.variants import ATTENTION_SETTINGS, shorten

_CHANGES: dict[str, dict[str, Any]] = {
    "default": {},
    "softmax": ATTENTION_SETTINGS["softmax"],
    "gamma: row sums start at 0.3": {"model.attention.row_sum_init": 0.3},
    "gamma: row sums start at 3": {"model.attention.row_sum_init": 3.0},
    "gamma per head": {"model.attention.gamma": "head"},
    "gamma fixed": {"model.attention.gamma": "fixed"},
    "no normalisation loss": {"train.normalisation_weight": 0.0},
    "normalisation loss 0.01": {"train.normalisation_weight": 0.01},
    "normalisation loss 0.1": {"train.normalisation_weight": 0.1},
    "entropy loss 0.01, margin 0.7": {"train.entropy_weight": 0.01},
    "entropy loss 0.01, margin 0.5": {"train.entropy_weight": 0.01, "train.entropy_margin": 0.5},
    "entropy loss 0.01, margin 0.9": {"train.entropy_weight": 0.01, "train.entropy_margin": 0.9},
    "length exponent 0": {"model.attention.length_exponent": 0.0},
    "length exponent 0.5": {"model.attention.length_exponent": 0.5},
    "threshold fixed at 0": {
        "model.attention.threshold": "fixed",
        "model.attention.threshold_init": 0.0,
    },
}
_TINY = ("default", "softmax", "no normalisation loss", "length exponent 0.5")


def _plan(plan: Plan) -> list[Cell]:
    """Trainings of a fifth of the budget's steps."""
    budget = plan.budget
    is_tiny = budget.name == "tiny"
    return [
        shorten(_cell(name, plan), 1.0 if is_tiny else 0.2)
        for name in (_TINY if is_tiny else _CHANGES)
    ]


def _cell(name: str, plan: Plan) -> Cell:
    training = plan.budget.sentence
    return Cell(
        "sensitivity." + name.replace(": ", "-").replace(", ", "-").replace(" ", "_"),
        {"change": name, "seed": 1},
        recipe=training.recipe,
        corpus="europarl-sent",
        settings={**training.settings, **_CHANGES[name], "train.seed": 1},
    )


def _conclude(results: Results) -> Findings:
    outcomes = results.outcomes
    base = mean_of(outcomes, "dev_nll", diverged=math.inf, change="default")
    others = [o for o in outcomes if o.labels["change"] not in ("default", "softmax")]
    losses = {o.labels["change"]: o.value("dev_nll") if o.finished else math.inf for o in others}
    best = min(losses, key=lambda change: losses[change], default=None)
    number, holds = "–", None
    if best is not None and not math.isnan(base):
        holds = losses[best] >= base - 0.01
        measured = f"best of {len(losses)} of {len(_CHANGES) - 2} changes"
        number = f"{measured}: {best}, {losses[best] - base:+.3f} nats"
        if not math.isfinite(losses[best] - base):
            number = "the default diverged" if math.isinf(base) else "every change diverged"
    verdict = combine(
        "No single change of gamma, losses, exponent or threshold improves the default",
        [holds],
        number,
        "holds if no change lowers the dev loss by more than 0.01 nats a token",
    )
    columns = {
        "dev nll": ("dev_nll", decimals(3)),
        "BLEU": ("bleu", decimals(2)),
        "entropy, cross": ("entropy_cross", decimals(2)),
        "zeros, cross": ("zeros_cross", percent),
        "dead rows, cross": ("dead_rows_cross", percent),
    }
    return Findings([verdict], [group_table("Changes", results, ("change",), columns)])


STUDY = Study(
    "sensitivity",
    QUESTIONS["sensitivity"],
    "The paper states C = 0.7 ln n and no weights.",
    _plan,
    _conclude,
    None,
    tuple(Requirement({"change": name}) for name in _CHANGES),
    notes="Earlier measurements around the default: docs/log.md, with their files in results/.",
)
