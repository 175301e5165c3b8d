"""Attentions and memories under comparison as settings, and the cells that train them.

A cell's name states everything that tells it apart, so studies that need the same training share
it.
"""

from dataclasses import replace
from typing import Any

from reluformer.study.budgets import Budget
from reluformer.study.cells import Cell
from reluformer.study.definition import Plan

# ReLU without row normalisation and threshold: the family of the paper's Eq. 6.
_PAPER: dict[str, Any] = {
    "model.attention.kind": "relu",
    "model.attention.power": 1,
    "model.attention.row_normalise": None,
    "model.attention.length_exponent": 0.5,
    "model.attention.threshold": "fixed",
    "model.attention.threshold_init": 0.0,
    # The paper does not state gamma; row sums that start above 1 collapse.
    "model.attention.row_sum_init": 1.0,
}
_WEIGHT = 0.003
# Steps of the recipe `sentence`.
_SENTENCE_STEPS = 7200


def _losses(normalisation: float, entropy: float) -> dict[str, Any]:
    return {"train.normalisation_weight": normalisation, "train.entropy_weight": entropy}


ATTENTION_SETTINGS: dict[str, dict[str, Any]] = {
    "softmax": {"model.attention.kind": "softmax"},
    "default": {},
    "squared": {"model.attention.power": 2},
    "plain": {
        **_PAPER,
        "model.attention.length_exponent": 0.0,
        "model.attention.row_sum_init": None,
        "model.attention.gamma": "fixed",
        **_losses(0.0, 0.0),
    },
    "scale": {**_PAPER, **_losses(0.0, 0.0)},
    "scale+norm": {**_PAPER, **_losses(_WEIGHT, 0.0)},
    "scale+entropy": {**_PAPER, **_losses(0.0, _WEIGHT)},
    "paper": {**_PAPER, **_losses(_WEIGHT, _WEIGHT)},
    "paper-gamma-1": {**_PAPER, "model.attention.row_sum_init": None, **_losses(0.05, 0.05)},
    "rela": {"model.attention.kind": "rela"},
    "sparsemax": {"model.attention.kind": "sparsemax"},
    "entmax15": {"model.attention.kind": "entmax15"},
    "sigmoid": {"model.attention.kind": "sigmoid"},
    "softmax+norm": {"model.attention.kind": "softmax", "model.attention.output_norm": True},
    "softmax+gate": {"model.attention.kind": "gated"},
}
"""Settings of each attention; `default` is what the recipe says."""

ATTENTION_NOTES = {
    "softmax": "softmax, the twin of all others",
    "default": "the ReLU attention of the recipes: ReLU(s + t)^4, row-normalised",
    "squared": "the default with power 2, whose kernels are faster",
    "plain": "ReLU(s), no scale, no losses",
    "scale": "ReLU(s) / (gamma sqrt(n/2)), no losses",
    "scale+norm": "with the normalisation loss",
    "scale+entropy": "with the entropy-margin loss",
    "paper": "scale and both losses, gamma calibrated to row sums of 1",
    "paper-gamma-1": "the same with gamma = 1 at the start and losses of 0.05",
    "rela": "ReLA: no scale, RMSNorm and gate on the output",
    "sparsemax": "sparsemax",
    "entmax15": "1.5-entmax",
    "sigmoid": "sigmoid(s - ln n)",
    "softmax+norm": "control: softmax with an RMSNorm on the output, as ReLA has",
    "softmax+gate": "control: softmax with a gate on the output",
}

CANDIDATES = {"default": "our default", "paper": "the paper's form"}
"""ReLU attentions that document models compare with softmax, with their names in claims."""

MEMORIES = ("relu", "softmax", "softmax_ln")


def memory_settings(
    kind: str, slots: int, *, unit_values: bool = False, temperature: float = 1.0
) -> dict[str, Any]:
    """Settings of a feed-forward memory whose values start with deviation slots^-1/2, or 1."""
    options: dict[str, Any] = {"value_std": 1.0 if unit_values else slots**-0.5}
    if temperature != 1.0:
        options["temperature"] = temperature
    return {"model.memory": kind, "model.slots": slots, "model.memory_options": options}


def sentence_cell(
    budget: Budget,
    *,
    attention: str = "softmax",
    memory: str = "relu",
    slots: int | None = None,
    unit_values: bool = False,
    temperature: float = 1.0,
    rate: float | None = None,
    seed: int = 1,
) -> Cell:
    """A sentence-level training of one attention and one memory."""
    slots = budget.memory_slots if slots is None else slots
    settings = {
        **budget.sentence.settings,
        **ATTENTION_SETTINGS[attention],
        "train.seed": seed,
    }
    if memory != "relu" or slots != budget.memory_slots:
        settings |= memory_settings(memory, slots, unit_values=unit_values, temperature=temperature)
    parts = ["sent", attention, f"{memory}-{slots}"]
    if unit_values:
        parts.append("unit")
    if temperature != 1.0:
        parts.append(f"t{temperature:g}")
    if rate is not None and rate != usual_rate(budget):
        settings["train.lr"] = rate
        parts.append(f"lr{rate:g}")
    labels = {
        "attention": attention,
        "memory": memory,
        "slots": slots,
        "values": "unit" if unit_values else "alike",
        "temperature": temperature,
        "rate": usual_rate(budget) if rate is None else rate,
        "seed": seed,
    }
    return Cell(
        ".".join([*parts, f"s{seed}"]),
        labels,
        recipe=budget.sentence.recipe,
        corpus="europarl-sent",
        settings=settings,
    )


def start_cell(budget: Budget, attention: str) -> Cell:
    """The sentence-level training that all document lengths of one attention start from."""
    settings = {
        **budget.document.settings,
        **_long_start(budget),
        **ATTENTION_SETTINGS[attention],
        "data.unit": "sentence",
        "data.max_length": min(128, min(budget.lengths)),
        "train.rescale_scores": False,
    }
    return Cell(
        f"doc.{attention}.start",
        {"attention": attention, "length": 0, "seed": 1},
        recipe=budget.document.recipe,
        corpus="europarl-doc",
        settings=settings,
    )


def document_cell(budget: Budget, attention: str, length: int, seed: int = 1) -> Cell:
    """A training on documents of up to `length` tokens, from the sentence-level start."""
    settings = {
        **budget.document.settings,
        **ATTENTION_SETTINGS[attention],
        "data.max_length": length,
        "data.cross_documents": length >= 1024,
        "train.seed": seed,
    }
    return Cell(
        f"doc.{attention}.{length}.s{seed}",
        {"attention": attention, "length": length, "seed": seed},
        recipe=budget.document.recipe,
        corpus="europarl-doc",
        settings=settings,
        parent=f"doc.{attention}.start",
    )


def large_cell(budget: Budget, attention: str, unit: str, seed: int) -> Cell:
    """A long training on `sentences` of europarl-doc, or one on `documents` that starts from it."""
    is_start = unit == "sentences"
    steps = budget.large_steps[0 if is_start else 1]
    settings = {
        **budget.document.settings,
        **ATTENTION_SETTINGS[attention],
        # Little dropout, as there is much data.
        "model.dropout": 0.1,
        "data.unit": "sentence" if is_start else "document",
        "data.max_length": min(128 if is_start else 512, max(budget.lengths)),
        "train.lr": 2e-3 if is_start else 1e-3,
        "train.seed": seed,
        **_schedule(steps),
        # It takes several calls.
        "train.checkpoint_every": max(1, steps // 12),
    }
    return Cell(
        f"large.{attention}.{unit}.s{seed}",
        {"attention": attention, "unit": unit, "seed": seed},
        recipe=budget.document.recipe,
        corpus="europarl-doc",
        settings=settings,
        parent=None if is_start else f"large.{attention}.sentences.s{seed}",
    )


def shorten(cell: Cell, share: float) -> Cell:
    """The cell with a share of its steps, a fifth of them warm-up; 1 leaves it as it is."""
    if share == 1:
        return cell
    steps = round(share * int(cell.settings.get("train.steps", _SENTENCE_STEPS)))
    settings = {**cell.settings, **_schedule(steps)}
    return replace(cell, name=f"{cell.name}.x{share:g}", settings=settings)


def _schedule(steps: int) -> dict[str, Any]:
    """Settings that depend on the number of steps, a fifth of them warm-up."""
    every = steps // 4
    return {
        "train.steps": steps,
        "train.warmup": steps // 5,
        "train.dev_every": every,
        "train.checkpoint_every": every,
        "train.log_every": max(1, steps // 20),
    }


def best_rate(plan: Plan, attention: str) -> float | None:
    """The learning rate with the lowest dev loss at seed 1; None until all rates have ended."""
    losses: dict[float, float] = {}
    for rate in plan.budget.rates:
        cell = sentence_cell(plan.budget, attention=attention, rate=rate)
        outcome = plan.outcomes.get(cell.name)
        if outcome is None:
            return None
        losses[rate] = outcome.value("dev_nll") if outcome.finished else float("inf")
    return min(losses, key=lambda rate: losses[rate])


def tuned_cells(plan: Plan, attention: str, seeds: tuple[int, ...]) -> list[Cell]:
    """Cells of one attention at every rate with seed 1, then of all seeds at the best rate."""
    cells = [sentence_cell(plan.budget, attention=attention, rate=r) for r in plan.budget.rates]
    rate = best_rate(plan, attention)
    if rate is not None:
        cells += [
            sentence_cell(plan.budget, attention=attention, rate=rate, seed=seed) for seed in seeds
        ]
    return list({cell.name: cell for cell in cells}.values())


def usual_rate(budget: Budget) -> float:
    """The rate of the budget's recipe."""
    return float(budget.sentence.settings.get("train.lr", 2e-3))


def _long_start(budget: Budget) -> dict[str, Any]:
    """Starts on sentences are longer than the trainings on documents that follow."""
    if budget.name == "tiny":
        return {}
    steps = 2 * int(budget.document.settings["train.steps"])
    return {"train.steps": steps, "train.warmup": steps // 7, "train.lr": 2e-3}
