"""Documents of 256 to 2048 tokens, from one start on sentences for each attention."""

from reluformer.study.catalogue.tables import (
    bleu_of,
    decimals,
    group_table,
    interval,
    lines_over,
)
from reluformer.study.cells import Cell
from reluformer.study.definition import Contrast, Plan, Requirement, Results, Study
from reluformer.study.findings import Findings, Plot, combine, decide, show_number
from reluformer.study.questions import QUESTIONS
from reluformer.study.variants import document_cell, start_cell

ATTENTIONS = ("softmax", "default", "paper")
_SEEDED = ("softmax", "default")


def _plan(plan: Plan) -> list[Cell]:
    """The longest first, whose translation takes the longest."""
    budget = plan.budget
    cells = [start_cell(budget, attention) for attention in ATTENTIONS]
    for length in sorted(budget.lengths, reverse=True):
        for attention in ATTENTIONS:
            several = attention in _SEEDED and length in budget.seeded_lengths
            seeds = budget.seeds if several else budget.seeds[:1]
            cells += [document_cell(budget, attention, length, seed) for seed in seeds]
    return cells


def _conclude(results: Results) -> Findings:
    documents = [o for o in results.outcomes if o.labels["length"]]
    outcomes = sorted(documents, key=lambda o: int(o.labels["length"]))
    lengths = sorted({o.labels["length"] for o in outcomes})

    def gain(length: int) -> float:
        relu = bleu_of(outcomes, "dbleu_long", attention="default", length=length)
        return relu - bleu_of(outcomes, "dbleu_long", attention="softmax", length=length)

    gains = {length: gain(length) for length in lengths}
    shown = ", ".join(f"{length}: {show_number(value)}" for length, value in gains.items())
    short: list[bool | None] = [_known(v, abs(v) <= 0.5) for n, v in gains.items() if n <= 256]
    long: list[bool | None] = [_known(v, v > 0) for n, v in gains.items() if n >= 512]
    between = interval(results, ("test.long", "document"), attention="default", length=1024)
    verdicts = [
        combine("Up to 256 tokens both are equal", short, f"d-BLEU by length {shown}",
                "holds if the difference is at most 0.5 d-BLEU"),
        combine("From 512 tokens on ReLU attention is ahead", long, f"d-BLEU by length {shown}",
                "holds if the difference is positive at every length from 512 on"),
        decide("At 1024 tokens the gain is large (paper: +1.15 BLEU)",
               gains.get(1024, float("nan")), holds=0.6, partly=0.0, unit=f"d-BLEU{between}",
               rule="holds from +0.6 on, partly above 0"),
    ]  # fmt: skip
    columns = {
        "d-BLEU, test": ("dbleu", decimals(2)),
        "d-BLEU, long": ("dbleu_long", decimals(2)),
        "BLEU, long": ("bleu_long", decimals(2)),
        "dev nll": ("dev_nll", decimals(3)),
        "dead rows": ("dead_rows_cross", decimals(3)),
    }
    by = ("length", "attention")
    shown_results = Results(outcomes, results.comparisons)
    table = group_table("Documents", shown_results, by, columns, ("test.long", "document"))
    plots = [
        Plot(title, "tokens of a document", label,
             lines_over(outcomes, "length", "attention", value), log_x=True)
        for title, label, value in (
            ("d-BLEU on long documents by length", "d-BLEU", "dbleu_long"),
            ("Dev loss by length", "nats a token", "dev_nll"),
        )
    ]  # fmt: skip
    return Findings(verdicts, [table], plots)


def _known(value: float, holds: bool) -> bool | None:
    return holds if value == value else None


STUDY = Study(
    "lengths",
    QUESTIONS["lengths"],
    "Equal to 256 tokens; ReLUFormer ahead from 512 on, +1.15 BLEU at 1024 (Europarl7 En-De).",
    _plan,
    _conclude,
    Contrast(("length", "attention"), {"attention": "softmax"}),
    tuple(
        Requirement(
            {"attention": attention, "length": length},
            3 if attention in _SEEDED and length in (256, 1024) else 1,
        )
        for length in (256, 512, 1024, 2048)
        for attention in ATTENTIONS
    ),
    notes="Every attention starts from its own training on sentences, the same for all lengths and "
    "seeds. d-BLEU is BLEU of whole documents. The full budget tries three length penalties.",
)
