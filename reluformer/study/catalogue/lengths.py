"""Documents of 256 to 2048 tokens, from one start on sentences for each attention."""

import math

from reluformer.study.catalogue.tables import (
    bleu_of,
    decimals,
    group_table,
    lines_over,
    paired,
)
from reluformer.study.cells import Cell
from reluformer.study.definition import Contrast, Plan, Requirement, Results, Study
from reluformer.study.findings import (
    Findings,
    Plot,
    Verdict,
    combine,
    decide,
    find_comparison,
    show_number,
)
from reluformer.study.questions import QUESTIONS
from reluformer.study.variants import CANDIDATES, document_cell, start_cell

ATTENTIONS = ("softmax", *CANDIDATES)
_SEEDED = ("softmax", "default")
_LONG = ("test.long", "document")


def _plan(plan: Plan) -> list[Cell]:
    """The longest first, whose translation takes the longest."""
    budget = plan.budget
    cells = [start_cell(budget, attention) for attention in ATTENTIONS]
    for length in sorted(budget.lengths, reverse=True):
        seeds = budget.seeds if length in budget.seeded_lengths else budget.seeds[:1]
        cells += [
            document_cell(budget, attention, length, seed)
            for seed in seeds
            for attention in (ATTENTIONS if seed == seeds[0] else _SEEDED)
        ]
    return cells


def _conclude(results: Results) -> Findings:
    documents = [o for o in results.outcomes if o.labels["length"]]
    outcomes = sorted(documents, key=lambda o: int(o.labels["length"]))
    shown_results = Results(outcomes, results.comparisons)
    verdicts = [
        verdict
        for attention, name in CANDIDATES.items()
        for verdict in _verdicts(shown_results, attention, name)
    ]
    columns = {
        "d-BLEU, test": ("dbleu", decimals(2)),
        "d-BLEU, long": ("dbleu_long", decimals(2)),
        "BLEU, long": ("bleu_long", decimals(2)),
        "dev nll": ("dev_nll", decimals(3)),
        "dead rows": ("dead_rows_cross", decimals(3)),
    }
    by = ("length", "attention")
    table = group_table("Documents", shown_results, by, columns, _LONG)
    plots = [
        Plot(title, "tokens of a document", label,
             lines_over(outcomes, "length", "attention", value), log_x=True)
        for title, label, value in (
            ("d-BLEU on long documents by length", "d-BLEU", "dbleu_long"),
            ("Dev loss by length", "nats a token", "dev_nll"),
        )
    ]  # fmt: skip
    return Findings(verdicts, [table], plots)


def _verdicts(results: Results, attention: str, name: str) -> list[Verdict]:
    """The paper's claims about long documents, for one ReLU attention."""

    def gain(length: int) -> tuple[float, str]:
        relu, softmax = (
            bleu_of(results.outcomes, "dbleu_long", attention=kind, length=length)
            for kind in (attention, "softmax")
        )
        return paired(results, _LONG, relu - softmax, attention=attention, length=length)

    def ahead(length: int, value: float) -> list[bool | None]:
        """Whether the gain is above 0, and whether its interval is."""
        if math.isinf(value):
            return [value > 0]
        labels = {"attention": attention, "length": length}
        comparison = find_comparison(results.comparisons, labels, *_LONG)
        low = math.nan if comparison is None else comparison.interval[0]
        return [_known(value, value > 0), _known(low, low > 0)]

    gains = {n: gain(n)[0] for n in sorted({o.labels["length"] for o in results.outcomes})}
    shown = ", ".join(f"{length}: {show_number(value)}" for length, value in gains.items())
    short = [_known(value, abs(value) <= 0.5) for n, value in gains.items() if n <= 256]
    long = [part for n, value in gains.items() if n >= 512 for part in ahead(n, value)]
    value, between = gain(1024)
    return [
        combine(f"Up to 256 tokens {name} and softmax are equal", short,
                f"d-BLEU by length {shown}", "holds if the difference is at most 0.5 d-BLEU"),
        combine(f"From 512 tokens on {name} is ahead", long, f"d-BLEU by length {shown}",
                "holds if the 95 % interval is above 0 at every length from 512 on, does not hold "
                "if no difference is above 0, partly in between"),
        decide(f"At 1024 tokens the gain of {name} is large (paper: +1.15 BLEU)", value,
               holds=0.6, partly=0.0, unit=f"d-BLEU{between}",
               rule="holds from +0.6 on, partly above 0"),
    ]  # fmt: skip


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
    "seeds. d-BLEU is BLEU of whole documents.",
)
