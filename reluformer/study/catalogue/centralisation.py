"""How much of the weight the top slots carry, and how alike the values are."""

import math
from statistics import mean

from reluformer.study.catalogue.tables import decimals as places
from reluformer.study.catalogue.tables import group_table, mean_of, percent
from reluformer.study.cells import Cell, Outcome
from reluformer.study.definition import Plan, Requirement, Results, Study
from reluformer.study.findings import Findings, Plot, Series, Verdict, decide
from reluformer.study.questions import QUESTIONS
from reluformer.study.variants import MEMORIES, best_rate, sentence_cell

_ATTENTIONS = ("softmax", "default", "paper")


def _plan(plan: Plan) -> list[Cell]:
    """Models that `ffn` and `attention` train."""
    budget = plan.budget
    memories = [
        sentence_cell(budget, memory=memory, seed=seed)
        for seed in budget.seeds
        for memory in MEMORIES
    ]
    attentions = [
        sentence_cell(budget, attention=attention, rate=best_rate(plan, attention), seed=seed)
        for seed in budget.seeds
        for attention in _ATTENTIONS[1:]
    ]
    return memories + attentions


def _curves(outcomes: list[Outcome], part: str) -> list[Series]:
    """Top-p % curves, means over layers and seeds."""
    label = "memory" if part == "memories" else "attention"
    shares: dict[str, list[list[float]]] = {}
    percents: list[float] = []
    for outcome in outcomes:
        inspection = outcome.detail.get("inspection", {})
        for item in inspection.get(part, []):
            percents = inspection["percents"]
            shares.setdefault(str(outcome.labels[label]), []).append(item["top_share"])
    return [
        Series(name, percents, [sum(column) / len(rows) for column in zip(*rows, strict=True)])
        for name, rows in shares.items()
    ]


def _gaps(outcomes: list[Outcome], attention: str) -> list[float]:
    """Points by which softmax is more centralised than an attention, for each seed of both.

    Every seed is measured on its own sentences, so other pairs cannot be compared.
    """
    shares = {
        kind: {
            o.labels["seed"]: 100 * o.value("top_cross")
            for o in outcomes
            if o.labels["attention"] == kind and o.finished
        }
        for kind in ("softmax", attention)
    }
    softmax, other = shares.values()
    return [softmax[seed] - other[seed] for seed in sorted(softmax.keys() & other.keys())]


def _less_centralised(name: str, gaps: list[float]) -> Verdict:
    by_seed = ", ".join(f"{gap:+.1f}" for gap in gaps)
    return decide(
        f"{name} is less centralised than softmax attention (cross-attention)",
        mean(gaps) if gaps else math.nan,
        holds=1.0,
        partly=-1.0,
        unit=f"points of the top 0.2 % share (softmax - ReLU, by seed {by_seed})",
        rule="holds from 1 point on, partly within 1 point; means over the seeds of both",
    )


def _verdicts(memories: list[Outcome], attentions: list[Outcome]) -> list[Verdict]:
    def memory(name: str, kind: str) -> float:
        return mean_of(memories, name, memory=kind)

    return [
        decide(
            "Softmax memories are centralised: the top 0.2 % of the slots carry over 85 %",
            100 * memory("memory_top", "softmax"),
            holds=85.0, partly=30.0, unit="% of the weight", signed=False,
            rule="holds from 85 % on, partly from 30 %",
        ),
        decide(
            "Values of softmax memories are more anisotropic than those of ReLU memories",
            memory("memory_anisotropy", "softmax") - memory("memory_anisotropy", "relu"),
            holds=0.02, partly=0.0, unit="mean cosine (softmax - ReLU)",
            rule="holds from +0.02 on, partly above 0",
        ),
        *(
            _less_centralised(name, _gaps(attentions, attention))
            for name, attention in (
                ("The paper's ReLU attention", "paper"),
                ("Our default ReLU attention", "default"),
            )
        ),
    ]  # fmt: skip


def _conclude(results: Results) -> Findings:
    memories = [o for o in results.outcomes if o.labels["attention"] == "softmax"]
    attentions = [o for o in results.outcomes if o.labels["memory"] == "relu"]
    tables = [
        group_table(
            "Memories (attention: softmax)",
            Results(memories),
            ("memory",),
            {
                "top 0.2 %": ("memory_top", percent),
                "anisotropy": ("memory_anisotropy", places(3)),
                "dead slots": ("memory_dead_slots", percent),
            },
        ),
        group_table(
            "Attentions (memory: ReLU): top 0.2 % share and anisotropy of values",
            Results(attentions),
            ("attention",),
            {
                f"{name} {site}": (f"{key}_{site}", show)
                for name, key, show in (
                    ("top", "top", percent),
                    ("cosine", "anisotropy", places(3)),
                )
                for site in ("encoder", "decoder", "cross")
            },
        ),
    ]
    plots = [
        Plot(f"Share of the weight on the top {items}: {part}", f"top p % of the {items}", "share",
             _curves(chosen, part), log_x=True)
        for part, items, chosen in (
            ("memories", "slots", memories), ("attentions", "keys", attentions)
        )
    ]  # fmt: skip
    return Findings(_verdicts(memories, attentions), tables, plots)


STUDY = Study(
    "centralisation",
    QUESTIONS["centralisation"],
    "Softmax: the top 0.2 % of the slots carry over 85 %; higher anisotropy than ReLU.",
    _plan,
    _conclude,
    None,
    tuple(Requirement({"memory": memory}) for memory in MEMORIES)
    + tuple(Requirement({"attention": attention}, seeds=3) for attention in _ATTENTIONS),
    notes="Measured on dev, with other sentences for every seed: only equal seeds can be compared. "
    "At least one slot counts as the top, which weighs on short rows. Scores are rescaled before, "
    "which spreads the weights of softmax and not those of the paper's form.",
)
