"""Models trained at one length on inputs of up to eight times that length."""

from reluformer.study.catalogue.tables import decimals, group_table, lines_over, mean_of
from reluformer.study.cells import Cell
from reluformer.study.definition import Contrast, Plan, Requirement, Results, Study
from reluformer.study.findings import Findings, Plot, decide
from reluformer.study.questions import QUESTIONS
from reluformer.study.variants import CANDIDATES, document_cell, start_cell

_ATTENTIONS = ("softmax", *CANDIDATES)


def _plan(plan: Plan) -> list[Cell]:
    budget = plan.budget
    trained = min(budget.test_lengths)
    cells = [start_cell(budget, attention) for attention in _ATTENTIONS]
    cells += [document_cell(budget, attention, trained) for attention in _ATTENTIONS]
    for attention in _ATTENTIONS:
        parent = document_cell(budget, attention, trained).name
        cells += [
            Cell(
                f"extrapolation.{attention}.{trained}-{length}",
                {"attention": attention, "tested": length, "seed": 1},
                work="extrapolation",
                corpus="europarl-doc",
                parent=parent,
                options={"length": length},
            )
            for length in budget.test_lengths
        ]
    return cells


def _conclude(results: Results) -> Findings:
    outcomes = [o for o in results.outcomes if "tested" in o.labels]
    lengths = sorted({o.labels["tested"] for o in outcomes})

    def drop(attention: str) -> float:
        at = [mean_of(outcomes, "dbleu", attention=attention, tested=n) for n in lengths]
        return at[0] - at[-1] if len(at) > 1 else float("nan")

    tested = f"from {lengths[0]} to {lengths[-1]} tokens" if lengths else ""
    verdict = decide(
        "ReLU attention loses less than softmax on inputs longer than those of training",
        drop("softmax") - drop("default"),
        holds=0.5, partly=-0.5, unit=f"d-BLEU (loss of softmax - loss of ReLU, {tested})",
        rule="holds from 0.5 d-BLEU on, partly within 0.5",
    )  # fmt: skip
    columns = {"d-BLEU": ("dbleu", decimals(2)), "BLEU": ("bleu", decimals(2)),
               "dev nll": ("dev_nll", decimals(3))}  # fmt: skip
    shown_results = Results(outcomes, results.comparisons)
    by = ("tested", "attention")
    plot = Plot("d-BLEU by tested length", "tokens of an input", "d-BLEU",
                lines_over(outcomes, "tested", "attention", "dbleu"), log_x=True)  # fmt: skip
    table = group_table("Tested lengths", shown_results, by, columns, ("test.long", "document"))
    return Findings([verdict], [table], [plot])


STUDY = Study(
    "extrapolation",
    QUESTIONS["extrapolation"],
    "does not test this.",
    _plan,
    _conclude,
    Contrast(("tested", "attention"), {"attention": "softmax"}),
    tuple(
        Requirement({"attention": attention, "tested": length})
        for attention in ("softmax", "default")
        for length in (512, 1024, 2048, 4096)
    ),
)
