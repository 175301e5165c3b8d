"""Closed forms for variance, row sum and entropy."""

import math

from reluformer.study.cells import Cell
from reluformer.study.definition import Plan, Requirement, Results, Study
from reluformer.study.findings import Findings, Plot, Series, Table, Verdict, combine
from reluformer.study.questions import QUESTIONS
from reluformer.study.theory import QUANTITIES, SIZES

_RULE = (
    "exact forms: within 4 standard errors (and 0.1 %) at every n; limits: within 1 % or 4 "
    "standard errors from n = 1024 on"
)


def _plan(plan: Plan) -> list[Cell]:
    return [Cell("theory.s1", {"seed": 1}, work="theory")]


def _agrees(sample: dict[str, float], exact: bool) -> bool:
    distance = abs(sample["measured"] - sample["closed"])
    slack = (0.001 if exact else 0.01) * abs(sample["closed"])
    return distance <= max(4 * sample["error"], slack)


def _conclude(results: Results) -> Findings:
    samples = [s for outcome in results.outcomes for s in outcome.detail.get("samples", [])]
    by_name = {q.name: [s for s in samples if s["quantity"] == q.name] for q in QUANTITIES}
    rows, verdicts = [], []
    for quantity in QUANTITIES:
        measured = by_name[quantity.name]
        checked = [s for s in measured if quantity.exact or s["n"] >= 1024]
        worst = max((abs(s["measured"] / s["closed"] - 1) for s in checked), default=math.nan)
        agreed: list[bool | None] = [_agrees(s, quantity.exact) for s in checked]
        state = combine("", agreed, "", "").state
        rows.append(
            [quantity.name, quantity.formula, "every n" if quantity.exact else "n ≥ 1024",
             "–" if math.isnan(worst) else f"{100 * worst:.2f} %", state]
        )  # fmt: skip
        verdicts.append(state)
    claim = "Output variances, row sums and entropies follow the closed forms"
    known: list[bool | None] = [None if v == "not measured" else v == "holds" for v in verdicts]
    number = f"{verdicts.count('holds')} of {len(verdicts)} closed forms agree with sampling"
    verdict: Verdict = combine(claim, known, number, _RULE)
    wide = Table(
        "Measured means by n",
        ["n", *(q.name for q in QUANTITIES)],
        [
            [str(n), *(f"{s['measured']:.4g}" for q in QUANTITIES for s in by_name[q.name]
                       if s["n"] == n)]
            for n in SIZES
        ],
    )  # fmt: skip
    plots = [
        Plot(
            "Output variance of one row of n keys", "n", "variance",
            [Series(name, [s["n"] for s in by_name[name]], [s["measured"] for s in by_name[name]])
             for name in ("ReLU variance", "scaled ReLU variance", "softmax variance")],
            log_x=True, log_y=True,
        )
    ] if samples else []  # fmt: skip
    columns = ["quantity", "closed form", "checked at", "largest deviation", "verdict"]
    return Findings([verdict], [Table("Closed forms against sampling", columns, rows), wide], plots)


STUDY = Study(
    "theory",
    QUESTIONS["theory"],
    "Variance n/2 of ReLU rows; divided by sqrt(n/2) it is 1 (the paper); the rest is ours.",
    _plan,
    _conclude,
    required=(Requirement({"seed": 1}),),
)
