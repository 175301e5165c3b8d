"""Whether a flatter softmax closes the gap to ReLU memories."""

from reluformer.study.catalogue.tables import decimals, group_table, mean_of, percent, significant
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
    relu = mean_of(outcomes, "bleu", memory="relu")
    cold = mean_of(outcomes, "bleu", memory="softmax", temperature=1.0)
    warm = [mean_of(outcomes, "bleu", memory="softmax", temperature=t) for t in _TEMPERATURES]
    known = [value for value in warm if value == value]
    remaining = relu - max(known) if known else float("nan")
    share = remaining / (relu - cold) if relu > cold else float("nan")
    verdict = decide(
        "A flatter softmax memory does not close the gap to ReLU",
        share,
        holds=0.5, partly=0.2, unit="of the gap remains at the best temperature", signed=False,
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
