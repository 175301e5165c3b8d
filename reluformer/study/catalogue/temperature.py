"""Whether a flatter softmax closes the gap to ReLU memories."""

import math

from reluformer.study.catalogue.tables import bleu_of, decimals, group_table, percent, significant
from reluformer.study.cells import Cell
from reluformer.study.definition import Contrast, Plan, Requirement, Results, Study
from reluformer.study.findings import Findings, decide
from reluformer.study.questions import QUESTIONS
from reluformer.study.variants import sentence_cell

_TEMPERATURES = (2.0, 4.0, 8.0)


def _plan(plan: Plan) -> list[Cell]:
    budget = plan.budget
    cells = [sentence_cell(budget), sentence_cell(budget, memory="softmax")]
    return cells + [
        sentence_cell(budget, memory="softmax", temperature=value) for value in _TEMPERATURES
    ]


def _conclude(results: Results) -> Findings:
    outcomes = results.outcomes
    relu = bleu_of(outcomes, memory="relu")
    cold = bleu_of(outcomes, memory="softmax", temperature=1.0)
    warm = [bleu_of(outcomes, memory="softmax", temperature=t) for t in _TEMPERATURES]
    known = [value for value in warm if not math.isnan(value)]
    remaining = relu - max(known, default=math.nan)
    share = remaining / (relu - cold) if 0 < relu - cold < math.inf else math.nan
    verdict = decide(
        "A flatter softmax memory does not close the gap to ReLU",
        share,
        holds=0.5, partly=0.2, signed=False,
        unit=f"of the gap remains at the best of {len(known)}/{len(warm)} temperatures",
        rule="holds if half of the gap or more remains, partly from a fifth on; not measured if "
        "softmax is not behind at temperature 1",
    )  # fmt: skip
    columns = {
        "BLEU": ("bleu", decimals(2)),
        "dev nll": ("dev_nll", decimals(3)),
        "variance ratio": ("memory_ratio", significant),
        "top 0.2 % share": ("memory_top", percent),
    }
    by = ("memory", "temperature")
    return Findings(
        [verdict],
        [group_table("Temperatures", results, by, columns, ("test", "sentence"))],
    )


STUDY = Study(
    "temperature",
    QUESTIONS["temperature"],
    "Raising the temperature of softmax had little effect.",
    _plan,
    _conclude,
    Contrast(("memory", "temperature"), {"memory": "relu", "temperature": 1.0}),
    tuple(Requirement({"memory": "softmax", "temperature": t}) for t in _TEMPERATURES),
)
