"""Feed-forward memories: ReLU, softmax, softmax with LayerNorm."""

import math

from reluformer.study.catalogue.tables import (
    bleu_of,
    curves,
    decimals,
    group_table,
    mean_of,
    paired,
    significant,
    thousands,
)
from reluformer.study.cells import Cell, Outcome
from reluformer.study.definition import Contrast, Plan, Requirement, Results, Study
from reluformer.study.findings import Findings, Plot, Series, Table, decide
from reluformer.study.questions import QUESTIONS
from reluformer.study.variants import MEMORIES, sentence_cell


def _plan(plan: Plan) -> list[Cell]:
    budget = plan.budget
    alike = [
        sentence_cell(budget, memory=memory, seed=seed)
        for seed in budget.seeds
        for memory in MEMORIES
    ]
    control = [sentence_cell(budget, memory=memory, unit_values=True) for memory in MEMORIES[1:]]
    return alike + control


def _memory_ratios(outcomes: list[Outcome]) -> dict[str, dict[str, float]]:
    """Variance ratio of each layer's memory by kind, from the first seed that finished."""
    ratios: dict[str, dict[str, float]] = {}
    for outcome in sorted(outcomes, key=lambda o: int(o.labels["seed"])):
        if outcome.finished:
            branches = outcome.detail["inspection"]["branches"]
            memories = {b["name"]: b["ratio"] for b in branches if b["name"].endswith("memory")}
            ratios.setdefault(f"{outcome.labels['memory']}, {outcome.labels['values']}", memories)
    return ratios


def _variance_table(ratios: dict[str, dict[str, float]]) -> Table:
    layers = next(iter(ratios.values()), {})
    rows = [[layer, *(f"{kind[layer]:.3g}" for kind in ratios.values())] for layer in layers]
    return Table("Variance ratio branch / residual by layer, first seed", ["layer", *ratios], rows)


def _variance_plot(ratios: dict[str, dict[str, float]]) -> Plot:
    series = [
        Series(kind, [float(layer) for layer in range(1, len(values) + 1)], list(values.values()))
        for kind, values in ratios.items()
    ]
    return Plot("Variance ratio of the memories, first seed", "layer (encoder, then decoder)",
                "branch / residual", series, log_y=True)  # fmt: skip


def _conclude(results: Results) -> Findings:
    outcomes = list(results.outcomes)

    def bleu(memory: str) -> float:
        return bleu_of(outcomes, memory=memory, values="alike")

    def ratio(memory: str) -> float:
        return mean_of(outcomes, "memory_ratio", memory=memory, values="alike")

    def gap(memory: str, *, negate: bool = False) -> tuple[float, str]:
        """BLEU of a memory minus that of ReLU, and the interval."""
        test, means = ("test", "sentence"), bleu(memory) - bleu("relu")
        return paired(results, test, means, negate=negate, memory=memory, values="alike")

    behind, behind_interval = gap("softmax", negate=True)
    restored, restored_interval = gap("softmax_ln")
    verdicts = [
        decide(
            "ReLU memories beat softmax memories (paper: +1.14 BLEU)",
            behind, holds=0.5, partly=0.15, unit=f"BLEU{behind_interval}",
            rule="holds from +0.5 BLEU on, partly from +0.15",
        ),
        decide(
            "Softmax with LayerNorm reaches ReLU (paper: 0.01 BLEU below)",
            restored, holds=-0.3, partly=-0.6, unit=f"BLEU{restored_interval}",
            rule="holds if at most 0.3 BLEU below, partly to 0.6",
        ),
        decide(
            "The variance ratio of softmax memories is far below ReLU's",
            ratio("relu") / ratio("softmax") if ratio("softmax") > 0 else math.nan,
            holds=5.0, partly=1.5, unit="times (ReLU / softmax)", signed=False,
            rule="holds from a factor of 5 on, partly from 1.5",
        ),
    ]  # fmt: skip
    by = ("memory", "values")
    columns = {
        "BLEU": ("bleu", decimals(2)),
        "chrF2": ("chrf", decimals(2)),
        "dev nll": ("dev_nll", decimals(3)),
        "variance ratio": ("memory_ratio", significant),
        "tokens/s": ("tokens_per_second", thousands),
    }
    table = group_table("Feed-forward memories", results, by, columns, ("test", "sentence"))
    ratios = _memory_ratios(outcomes)
    plots = [
        _variance_plot(ratios),
        curves(outcomes, lambda o: f"{o.labels['memory']}, {o.labels['values']}"),
    ]
    return Findings(verdicts, [table, _variance_table(ratios)], plots)


STUDY = Study(
    "ffn",
    QUESTIONS["ffn"],
    "ReLU 34.22, softmax 33.08, softmax + LN 34.21 BLEU (IWSLT14 De-En).",
    _plan,
    _conclude,
    Contrast(("memory", "values"), {"memory": "relu", "values": "alike"}),
    tuple(Requirement({"memory": memory, "values": "alike"}, 3) for memory in MEMORIES)
    + (Requirement({"memory": "softmax", "values": "unit"}),),
    notes="Values of all kinds start with deviation slots^-1/2 (alike); in the control called "
    "unit, the softmax kinds start with deviation 1. europarl-sent (En-De) stands in for IWSLT14.",
)
