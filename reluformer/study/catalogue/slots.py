"""How memories scale with the number of slots."""

from reluformer.study.catalogue.tables import (
    bleu_of,
    decimals,
    group_table,
    lines_over,
    paired,
    significant,
)
from reluformer.study.cells import Cell
from reluformer.study.definition import Contrast, Plan, Requirement, Results, Study
from reluformer.study.findings import Findings, Plot, combine, decide, show_number
from reluformer.study.questions import QUESTIONS
from reluformer.study.variants import MEMORIES, sentence_cell, shorten, usual_rate


def _plan(plan: Plan) -> list[Cell]:
    budget = plan.budget
    # At the rate of the other studies, ReLU diverges with 4096 slots (docs/log.md).
    rate = usual_rate(budget) / 2
    sizes = sorted({*budget.slots, budget.memory_slots})
    cells = []
    for slots in sizes:
        seeds = budget.seeds if slots == max(budget.slots) else budget.seeds[:1]
        cells += [
            shorten(
                sentence_cell(budget, memory=memory, slots=slots, rate=rate, seed=seed),
                budget.slots_share,
            )
            for seed in seeds
            for memory in MEMORIES
        ]
    return cells


def _conclude(results: Results) -> Findings:
    outcomes = results.outcomes
    sizes = sorted({o.labels["slots"] for o in outcomes})

    def bleu(memory: str, slots: int) -> float:
        return bleu_of(outcomes, memory=memory, slots=slots)

    gaps = {slots: bleu("relu", slots) - bleu("softmax", slots) for slots in sizes}
    largest = max(sizes, default=0)
    known: list[bool | None] = [None if gap != gap else gap > 0 for gap in gaps.values()]
    shown = ", ".join(f"{slots}: {show_number(gap)}" for slots, gap in gaps.items())
    behind, between = paired(
        results, ("test", "sentence"), bleu("softmax_ln", largest) - bleu("relu", largest),
        negate=True, memory="softmax_ln", slots=largest,
    )  # fmt: skip
    verdicts = [
        combine(
            "ReLU beats softmax at every number of slots", known, f"BLEU by slots {shown}",
            "holds if the mean BLEU of ReLU is higher at every size",
        ),
        decide(
            f"Softmax + LayerNorm falls behind ReLU at the largest size ({largest} slots)",
            behind, holds=0.2, partly=0.0, unit=f"BLEU (ReLU - softmax + LN){between}",
            rule="holds from +0.2 BLEU on, partly above 0",
        ),
    ]  # fmt: skip
    columns = {
        "BLEU": ("bleu", decimals(2)),
        "dev nll": ("dev_nll", decimals(3)),
        "variance ratio": ("memory_ratio", significant),
        "dead slots": ("memory_dead_slots", decimals(3)),
    }
    table = group_table("Slots", results, ("slots", "memory"), columns, ("test", "sentence"))
    plots = [
        Plot("BLEU by slots", "slots", "BLEU", lines_over(outcomes, "slots", "memory", "bleu"),
             log_x=True),
        Plot("Dev loss by slots", "slots", "nats a token",
             lines_over(outcomes, "slots", "memory", "dev_nll"), log_x=True),
    ]  # fmt: skip
    return Findings(verdicts, [table], plots)


STUDY = Study(
    "slots",
    QUESTIONS["slots"],
    "ReLU above softmax everywhere; above softmax + LN at 3072 and 4096 slots.",
    _plan,
    _conclude,
    Contrast(("slots", "memory"), {"memory": "relu"}),
    tuple(
        Requirement({"memory": memory, "slots": slots}, 3 if slots == 4096 else 1)
        for slots in (32, 512, 4096)
        for memory in MEMORIES
    ),
    notes="Values of all kinds start with deviation slots^-1/2. Trainings have half the rate of "
    "the other studies and, in the full budget, 40 % of their tokens.",
)
