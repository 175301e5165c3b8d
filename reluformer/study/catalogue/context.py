"""How document models use context."""

from reluformer.study.catalogue.tables import decimals, group_table, mean_of, percent
from reluformer.study.cells import Cell
from reluformer.study.definition import Plan, Requirement, Results, Study
from reluformer.study.findings import Findings, decide
from reluformer.study.questions import QUESTIONS
from reluformer.study.variants import CANDIDATES, document_cell, start_cell

_ATTENTIONS = ("softmax", *CANDIDATES)


def _plan(plan: Plan) -> list[Cell]:
    budget = plan.budget
    length = budget.context_length
    cells = [start_cell(budget, attention) for attention in _ATTENTIONS]
    cells += [document_cell(budget, attention, length) for attention in _ATTENTIONS]
    return cells + [
        Cell(
            f"context.{attention}.{length}",
            {"attention": attention, "context": length, "seed": 1},
            work="context",
            corpus="europarl-doc",
            parent=document_cell(budget, attention, length).name,
        )
        for attention in _ATTENTIONS
    ]


def _conclude(results: Results) -> Findings:
    outcomes = [o for o in results.outcomes if "context" in o.labels]

    def value(name: str, attention: str) -> float:
        return mean_of(outcomes, name, attention=attention)

    verdicts = [
        decide(
            f"With {name}, document models use context: right context beats a shuffled one",
            value("bleu_document", attention) - value("bleu_shuffled", attention),
            holds=0.3, partly=0.0, unit="BLEU (document - shuffled)",
            rule="holds from +0.3 BLEU on, partly above 0",
        )
        for attention, name in CANDIDATES.items()
    ]  # fmt: skip
    verdicts += [
        decide(
            f"With {name}, the encoder reads more of other sentences than with softmax",
            100 * (value("outside_encoder", attention) - value("outside_encoder", "softmax")),
            holds=2.0, partly=-2.0, unit="points of the weight",
            rule="holds from 2 points on, partly within 2",
        )
        for attention, name in CANDIDATES.items()
    ]  # fmt: skip
    bleu = {
        f"BLEU, {name}": (f"bleu_{name}", decimals(2))
        for name in ("document", "sentence", "shuffled")
    }
    reading = {
        **{f"outside, {s}": (f"outside_{s}", percent) for s in ("encoder", "decoder", "cross")},
        **{f"distance, {s}": (f"distance_{s}", decimals(1)) for s in ("encoder", "decoder")},
    }
    probed = Results(outcomes)
    tables = [
        group_table("Translation with the document, sentence by sentence, shuffled", probed,
                    ("attention",), bleu),
        group_table("Share of weight on other sentences, and mean distance in tokens", probed,
                    ("attention",), reading),
    ]  # fmt: skip
    return Findings(verdicts, tables)


STUDY = Study(
    "context",
    QUESTIONS["context"],
    "ReLU attention reads wider context and puts less weight on commas and stop words.",
    _plan,
    _conclude,
    None,
    tuple(Requirement({"attention": a, "context": 1024}) for a in _ATTENTIONS),
)
