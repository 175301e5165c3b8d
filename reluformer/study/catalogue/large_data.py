"""Ten times the sentences, then documents of 512 tokens: softmax, our default, the paper's form."""

from collections.abc import Sequence
from itertools import product

from reluformer.study.catalogue.tables import curves, decimals, group_table, percent
from reluformer.study.catalogue.verdicts import reaches
from reluformer.study.cells import Cell, Outcome
from reluformer.study.definition import Contrast, Plan, Requirement, Results, Study
from reluformer.study.findings import Findings, Table
from reluformer.study.questions import QUESTIONS
from reluformer.study.variants import CANDIDATES, large_cell

_ATTENTIONS = ("softmax", *CANDIDATES)
_UNITS = {"sentences": ("test", "sentence"), "documents": ("test", "document")}
_SEEDS = 2


def _plan(plan: Plan) -> list[Cell]:
    """The first seed of everything before the second."""
    seeds = plan.budget.seeds[:_SEEDS]
    return [
        large_cell(plan.budget, attention, unit, seed)
        for seed, unit, attention in product(seeds, _UNITS, _ATTENTIONS)
    ]


def _conclude(results: Results) -> Findings:
    verdicts = [
        reaches(
            f"With ten times the data {name} reaches softmax on {unit}",
            results,
            {"unit": unit, "attention": attention},
            test,
        )
        for (unit, test), (attention, name) in product(_UNITS.items(), CANDIDATES.items())
    ]
    tables = []
    for unit, test in _UNITS.items():
        outcomes = [o for o in results.outcomes if o.labels["unit"] == unit]
        name, value = ("BLEU", "bleu") if unit == "sentences" else ("d-BLEU", "dbleu")
        columns = {
            f"{name}, test": (value, decimals(2)),
            f"{name}, long": (f"{value}_long", decimals(2)),
            "dev nll": ("dev_nll", decimals(3)),
            "train nll": ("train_nll", decimals(3)),
            "zeros, cross": ("zeros_cross", percent),
            "dead rows, cross": ("dead_rows_cross", percent),
        }
        shown = Results(outcomes, results.comparisons)
        by = ("unit", "attention")
        tables.append(group_table(f"Trained on {unit}", shown, by, columns, test))
    tables += _by_length(results.outcomes, "test")
    tables += _by_length(results.outcomes, "test.long")
    plot = curves(results.outcomes, lambda o: f"{o.labels['attention']}, {o.labels['unit']}")
    return Findings(verdicts, tables, [plot])


def _by_length(outcomes: Sequence[Outcome], test: str) -> list[Table]:
    """d-BLEU by the length of documents, if there are models of documents."""
    rows: list[list[str]] = []
    words: list[str] = []
    for outcome in outcomes:
        groups = outcome.detail.get("scores", {}).get(test, {}).get("d-BLEU", {}).get("by_length")
        if groups:
            words = [f"{group['words']} ({group['documents']})" for group in groups]
            name = f"{outcome.labels['attention']}, seed {outcome.labels['seed']}"
            rows.append([name, *(f"{group['value']:.2f}" for group in groups)])
    title = f"d-BLEU on {test} by words of a document (number of documents)"
    return [Table(title, ["model", *words], rows)] if rows else []


STUDY = Study(
    "large-data",
    QUESTIONS["large-data"],
    "does not test this.",
    _plan,
    _conclude,
    Contrast(("unit", "attention"), {"attention": "softmax"}),
    tuple(
        Requirement({"attention": attention, "unit": unit}, _SEEDS)
        for unit, attention in product(_UNITS, _ATTENTIONS)
    ),
    notes="300 M target tokens of sentences, then 58 M of documents of up to 512 tokens, with "
    "dropout 0.1, and power 8 in the default. Scores are rescaled after both.",
)
