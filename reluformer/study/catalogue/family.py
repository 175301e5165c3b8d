"""Every attention of the family on six synthetic tasks."""

from reluformer.ops.family.table import ATTENTIONS
from reluformer.study.catalogue.tables import decimals, group_table
from reluformer.study.cells import Cell, group, summarise
from reluformer.study.definition import Plan, Requirement, Results, Study
from reluformer.study.findings import Findings, combine, show_number
from reluformer.study.questions import QUESTIONS
from reluformer.study.tasks import TASKS


def _plan(plan: Plan) -> list[Cell]:
    kinds = plan.budget.family.kinds or tuple(ATTENTIONS)
    return [
        Cell(
            f"family.{kind}.s{seed}",
            {"attention": kind, "seed": seed},
            work="family",
            options={"kind": kind},
        )
        for seed in plan.budget.seeds
        for kind in kinds
    ]


def _conclude(results: Results) -> Findings:
    groups = {key[0]: members for key, members in group(results.outcomes, "attention").items()}

    def score(kind: str, task: str) -> float:
        return summarise(groups.get(kind, []), task).mean

    relu = [score("relu", task) for task in TASKS]
    softmax = [score("softmax", task) for task in TASKS]
    known: list[bool | None] = [
        None if a != a or b != b else a >= b - 0.02 for a, b in zip(relu, softmax, strict=True)
    ]
    without_sink = {
        kind: score(kind, "sink trigger") for kind in ("softmax", "relu", "rela", "softmax1")
    }
    shown = ", ".join(f"{kind} {show_number(value, '.2f')}" for kind, value in without_sink.items())
    free = [without_sink[kind] for kind in ("rela", "softmax1")]
    sink: list[bool | None] = [
        None if value != value or without_sink["softmax"] != without_sink["softmax"]
        else value > without_sink["softmax"] + 0.02
        for value in free
    ]  # fmt: skip
    verdicts = [
        combine(
            "ReLU attention learns every task that softmax learns",
            known,
            ", ".join(
                f"{task} {show_number(a, '.2f')}/{show_number(b, '.2f')}"
                for task, a, b in zip(TASKS, relu, softmax, strict=True)
            ),
            "holds if its score is at most 0.02 below softmax's on each task (ReLU/softmax shown)",
        ),
        combine(
            "Attentions that may read nothing solve the sink trigger better than softmax",
            sink,
            shown,
            "holds if ReLA and softmax1 score more than 0.02 above softmax",
        ),
    ]
    columns = {task: (task, decimals(2)) for task in TASKS}
    return Findings(verdicts, [group_table("Scores, 0 to 1", results, ("attention",), columns)])


STUDY = Study(
    "family",
    QUESTIONS["family"],
    "does not test this; the tasks are those that the attentions' own papers use.",
    _plan,
    _conclude,
    None,
    tuple(Requirement({"attention": kind}, 3) for kind in ATTENTIONS),
    notes="Two causal layers, one rate and one setting for all attentions, no losses on row sums.",
)
