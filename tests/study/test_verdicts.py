"""Verdicts of the studies on made-up results, with numbers that are computed here by hand."""

from typing import Any

import pytest

from reluformer.study.cells import Outcome
from reluformer.study.definition import Results
from reluformer.study.findings import Comparison
from reluformer.study.registry import STUDIES
from reluformer.study.tasks import TASKS

SENTENCE = {
    "attention": "softmax",
    "memory": "relu",
    "slots": 1024,
    "values": "alike",
    "temperature": 1.0,
    "rate": 2e-3,
    "seed": 1,
}
_INSPECTION = {"branches": [{"name": "encoder.0.memory", "ratio": 0.5}], "attentions": []}


def cell(labels: dict[str, Any], **values: float) -> Outcome:
    """An outcome; one without values has diverged."""
    name = ".".join(map(str, labels.values()))
    if not values:
        return Outcome(name, labels, "diverged", {}, reason="loss is NaN")
    return Outcome(name, labels, "finished", values, {"inspection": _INSPECTION})


def sent(labels: dict[str, Any], **values: float) -> Outcome:
    return cell(SENTENCE | labels, **values)


def document(attention: str, length: int, **values: float) -> Outcome:
    return cell({"attention": attention, "length": length, "seed": 1}, **values)


def decided(study: str, *outcomes: Outcome) -> list[tuple[str, str]]:
    """State and number of each verdict."""
    verdicts = STUDIES[study].conclude(Results(outcomes)).verdicts
    return [(verdict.state, verdict.number) for verdict in verdicts]


def test_memories() -> None:
    bleu = {"relu": (20.0, 21.0), "softmax": (19.0, 19.4), "softmax_ln": (20.0, 20.2)}
    ratio = {"relu": 0.4, "softmax": 0.1, "softmax_ln": 0.2}
    outcomes = [
        sent({"memory": kind, "seed": seed}, bleu=bleu[kind][seed], memory_ratio=ratio[kind])
        for kind in bleu
        for seed in (0, 1)
    ]
    # 20.5 - 19.2, 20.1 - 20.5 and 0.4 / 0.1.
    assert decided("ffn", *outcomes) == [
        ("holds", "+1.30 BLEU"),
        ("holds partly", "-0.40 BLEU"),
        ("holds partly", "4.00 times (ReLU / softmax)"),
    ]
    # Softmax has diverged with both seeds, LayerNorm with one.
    for at in (2, 3, 5):
        outcomes[at] = sent(outcomes[at].labels)
    assert decided("ffn", *outcomes) == [
        ("holds", "one of the two diverged"),
        ("holds partly", "-0.50 BLEU"),
        ("not measured", "–"),
    ]
    silent = sent({"memory": "softmax"}, bleu=1.0, memory_ratio=0.0)
    assert decided("ffn", outcomes[0], silent)[2] == ("not measured", "–")


def test_curves_and_ratios_are_of_the_first_seed_of_each_kind() -> None:
    def memory(kind: str, seed: int, ratio: float) -> Outcome:
        made = sent({"memory": kind, "seed": seed}, bleu=20.0)
        made.detail["inspection"] = {"branches": [{"name": "encoder.0.memory", "ratio": ratio}]}
        made.detail["curve"] = [{"tokens": 1e6 * seed, "dev": {"nll": 2.0}}]
        return made

    outcomes = [memory("relu", 3, 0.3), memory("relu", 2, 0.2), memory("softmax", 1, 0.1)]
    outcomes.append(sent({"memory": "relu", "seed": 0}))
    findings = STUDIES["ffn"].conclude(Results(outcomes))
    assert findings.tables[1].columns == ["layer", "softmax, alike", "relu, alike"]
    assert findings.tables[1].rows == [["encoder.0.memory", "0.1", "0.2"]]
    assert [(one.name, one.xs) for one in findings.plots[1].series] == [
        ("softmax, alike", [1.0]),
        ("relu, alike", [2.0]),
    ]


def test_the_ladder_of_attentions() -> None:
    softmax = sent({}, bleu=25.0, dev_nll=1.7)
    half_dead = {"bleu": 24.5, "dev_nll": 1.8, "entropy_cross": 1.0, "dead_rows_cross": 0.5}
    no_dead = {"bleu": 24.4, "dev_nll": 1.8, "entropy_cross": 1.5, "dead_rows_cross": 0.0}
    outcomes = [
        softmax,
        # A lower dev loss at another rate, which is the one that counts.
        sent({"attention": "default", "rate": 4e-3}, bleu=20.0, dev_nll=1.8),
        sent({"attention": "default"}, bleu=24.8, dev_nll=1.75),
        # Without the first seed.
        sent({"attention": "plain", "seed": 2}, bleu=1.0, dev_nll=2.1),
        sent({"attention": "scale", "seed": 2}, **half_dead),
        sent({"attention": "scale+norm", "seed": 2}, **no_dead),
    ]
    assert decided("attention", *outcomes) == [
        ("does not hold here", "dev nll 2.10 against 1.70"),
        ("holds", "+0.50 BLEU (softmax - scale only)"),
        # A half of the rows had 2.0 nats, and now all have 1.5.
        (
            "holds partly",
            "+0.50 nats in cross-attention (-0.50 in rows that read), -0.10 BLEU (1 seed)",
        ),
        ("not measured", "–"),
        ("not measured", "–"),
        ("not measured", "–"),
    ]
    diverged = [sent({"attention": name}) for name in ("plain", "scale", "default")]
    states = [state for state, _ in decided("attention", softmax, *diverged)]
    unknown = "not measured"
    assert states == ["holds", "holds", unknown, unknown, "does not hold here", unknown]


@pytest.mark.parametrize(
    ("interval", "state"),
    [
        ((-0.2, 0.3), "holds"),
        # As printed, with two decimals.
        ((-0.204, 0.3), "holds"),
        ((-0.206, 0.3), "holds partly"),
        ((-0.6, -0.2), "holds partly"),
        ((-0.6, -0.21), "does not hold here"),
    ],
)
def test_an_attention_reaches_softmax_by_its_interval(
    interval: tuple[float, float], state: str
) -> None:
    comparisons = [
        Comparison("test", "sentence", {"attention": name}, {}, 3, difference, limits, 0.7, "")
        for name, difference, limits in (
            ("paper", -1.0, (-1.2, -0.8)),
            ("default", -0.0, interval),
            ("squared", 0.1, (0.05, 0.15)),
        )
    ]
    outcomes = [sent({"attention": c.system["attention"]}, bleu=25.0) for c in comparisons]
    findings = STUDIES["attention"].conclude(Results([sent({}, bleu=25.0), *outcomes], comparisons))
    states = [verdict.state for verdict in findings.verdicts[-3:]]
    assert states == ["does not hold here", state, "holds"]


def test_centralisation_is_compared_over_the_seeds_of_both() -> None:
    shares = {"softmax": (0.5, 0.6, 0.9), "paper": (0.55, 0.45), "default": (0.5, 0.58, 0.91)}
    outcomes = [
        sent({"attention": kind, "seed": seed}, top_cross=share)
        for kind, measured in shares.items()
        for seed, share in enumerate(measured, 1)
    ]
    unit = "points of the top 0.2 % share (softmax - ReLU, by seed"
    assert decided("centralisation", *outcomes)[2:] == [
        ("holds", f"+5.00 {unit} -5.0, +15.0)"),
        ("holds partly", f"+0.33 {unit} +0.0, +2.0, -1.0)"),
    ]
    diverged = sent({"attention": "paper"})
    assert decided("centralisation", outcomes[0], diverged)[2] == ("not measured", "–")


def test_documents() -> None:
    outcomes = [document("softmax", n, dbleu_long=25.0) for n in (256, 512, 1024)]
    outcomes += [document("default", n, dbleu_long=25.0 + n / 2048) for n in (256, 512)]
    outcomes.append(document("default", 1024))
    shown = "d-BLEU by length 256: +0.12, 512: +0.25, 1024: diverged"
    unknown = "not measured"
    assert decided("lengths", *outcomes) == [
        ("holds", shown),
        # The differences have no intervals.
        (unknown, shown),
        ("does not hold here", "one of the two diverged"),
        *[(unknown, "–")] * 3,
    ]
    diverged = [*outcomes[1:3], *(document("default", n) for n in (512, 1024))]
    assert decided("lengths", *diverged)[1][0] == "does not hold here"


@pytest.mark.parametrize(
    ("lows", "state"),
    [((0.1, 0.2), "holds"), ((0.1, -0.2), "holds partly"), (None, "not measured")],
)
def test_ahead_on_documents_is_ahead_by_the_interval(
    lows: tuple[float, float] | None, state: str
) -> None:
    outcomes = [document("softmax", n, dbleu_long=25.0) for n in (512, 1024)]
    outcomes += [document("paper", n, dbleu_long=26.0) for n in (512, 1024)]
    comparisons = [
        Comparison(
            "test.long", "document", {"length": length, "attention": "paper"}, {}, 1,
            0.996, (low, 2.0), 0.1, "",
        )
        for length, low in zip((512, 1024), lows or (), strict=False)
    ]  # fmt: skip
    verdicts = STUDIES["lengths"].conclude(Results(outcomes, comparisons)).verdicts
    assert [verdict.state for verdict in verdicts[3:5]] == ["not measured", state]
    if lows:
        assert verdicts[5].number == f"+1.00 d-BLEU (95 %: {lows[1]:+.2f} to +2.00, 1 seed)"


def test_ten_times_the_data() -> None:
    def large(attention: str, unit: str, seed: int = 1, **values: float) -> Outcome:
        made = cell({"attention": attention, "unit": unit, "seed": seed}, **values)
        groups = [{"words": "1-128", "documents": 7, "value": values.get("dbleu", 0.0)}]
        if unit == "documents" and values:
            made.detail["scores"] = {"test": {"d-BLEU": {"by_length": groups}}}
        return made

    outcomes = [
        large("softmax", "sentences", bleu=25.0),
        large("default", "sentences", bleu=25.3),
        large("paper", "sentences"),
        large("softmax", "documents", dbleu=28.0),
        large("default", "documents", dbleu=27.5),
    ]
    comparisons = [
        Comparison("test", level, {"unit": unit, "attention": "default"}, {}, 2, gap, limits, 1, "")
        for unit, level, gap, limits in (
            ("sentences", "sentence", 0.3, (-0.1, 0.7)),
            ("documents", "document", -0.5, (-0.8, -0.1)),
        )
    ]
    findings = STUDIES["large-data"].conclude(Results(outcomes, comparisons))
    assert [(verdict.state, verdict.number) for verdict in findings.verdicts] == [
        ("holds", "+0.30 BLEU (95 %: -0.10 to +0.70, 2 seeds)"),
        ("does not hold here", "one of the two diverged"),
        ("holds partly", "-0.50 d-BLEU (95 %: -0.80 to -0.10, 2 seeds)"),
        ("not measured", "–"),
    ]
    assert findings.tables[-1].columns == ["model", "1-128 (7)"]
    assert findings.tables[-1].rows == [["softmax, seed 1", "28.00"], ["default, seed 1", "27.50"]]


def test_longer_inputs_than_trained_on() -> None:
    def tested(attention: str, length: int, dbleu: float) -> Outcome:
        return cell({"attention": attention, "tested": length, "seed": 1}, dbleu=dbleu)

    short = [tested("softmax", 512, 25.0), tested("default", 512, 24.0)]
    assert decided("extrapolation", *short) == [("not measured", "–")]
    long = [tested("softmax", 2048, 21.0), tested("default", 2048, 23.0)]
    # Softmax loses 4, ReLU 1.
    number = "+3.00 d-BLEU (loss of softmax - loss of ReLU, from 512 to 2048 tokens)"
    assert decided("extrapolation", *short, *long) == [("holds", number)]


@pytest.mark.parametrize(
    ("losses", "decision"),
    [
        (
            {"default": 2.0, "a": 1.995, "b": 2.2},
            ("holds", "best of 2 of 13 changes: a, -0.005 nats"),
        ),
        (
            {"default": 2.0, "a": 1.9, "b": 2.2},
            ("does not hold here", "best of 2 of 13 changes: a, -0.100 nats"),
        ),
        ({"default": 2.0, "a": None}, ("holds", "every change diverged")),
        ({"default": None, "a": 1.9}, ("does not hold here", "the default diverged")),
        ({"default": 2.0, "softmax": 1.0}, ("not measured", "–")),
        ({"a": 1.9}, ("not measured", "–")),
    ],
)
def test_single_changes(losses: dict[str, float | None], decision: tuple[str, str]) -> None:
    outcomes = [
        cell({"change": change, "seed": 1}, **({} if loss is None else {"dev_nll": loss}))
        for change, loss in losses.items()
    ]
    assert decided("sensitivity", *outcomes) == [decision]


def test_slots_and_temperatures() -> None:
    sizes = [
        sent({"memory": kind, "slots": slots}, bleu=bleu)
        for slots in (32, 4096)
        for kind, bleu in (("relu", 20.0 + slots / 4096), ("softmax", 20.5), ("softmax_ln", 20.9))
    ]
    assert decided("slots", *sizes) == [
        ("holds partly", "BLEU by slots 32: -0.49, 4096: +0.50"),
        ("holds partly", "+0.10 BLEU (ReLU - softmax + LN)"),
    ]
    cold = [sent({}, bleu=25.0), sent({"memory": "softmax"}, bleu=24.0)]
    warm = [
        sent({"memory": "softmax", "temperature": t}, bleu=b) for t, b in ((2.0, 24.3), (4.0, 24.6))
    ]
    number = "0.40 of the gap remains at the best of 2/3 temperatures"
    assert decided("temperature", *cold, *warm) == [("holds partly", number)]
    assert (
        decided("temperature", cold[0], sent({"memory": "softmax"}), *warm)[0][0] == "not measured"
    )


def test_tasks_that_were_not_measured_have_no_number() -> None:
    known = [
        cell({"attention": kind, "seed": 1}, **dict.fromkeys(TASKS, 0.9))
        for kind in ("softmax", "rela")
    ]
    number = "softmax 0.90, relu –, rela 0.90, softmax1 –"
    assert decided("family", *known)[1] == ("not measured", number)
    part = cell({"attention": "relu", "seed": 1}, copy=1.0)
    assert decided("family", *known, part)[0][1].startswith("copy 1.00/0.90, reverse –/0.90")
    (table, _) = STUDIES["theory"].conclude(Results([])).tables
    assert table.rows[0][3:] == ["–", "not measured"]


def test_intervals_name_their_seeds() -> None:
    comparison = Comparison(
        "test", "sentence", {"attention": "default"}, {"attention": "softmax"}, 1,
        0.05, (-0.2, 0.3), 0.7, "",
    )  # fmt: skip
    outcomes = [sent({}, bleu=25.0), sent({"attention": "default"}, bleu=25.05)]
    verdicts = STUDIES["attention"].conclude(Results(outcomes, [comparison])).verdicts
    assert verdicts[-2].number == "+0.05 BLEU (95 %: -0.20 to +0.30, 1 seed)"


def test_learning_rates_stand_together() -> None:
    order = [("softmax", 4e-3), ("paper", 2e-3), ("softmax", 2e-3), ("softmax", 1e-3)]
    outcomes = [sent({"attention": a, "rate": rate}, bleu=20.0, dev_nll=2.0) for a, rate in order]
    (table,) = STUDIES["attention"].conclude(Results(outcomes)).tables[2:]
    assert [row[0] for row in table.rows] == [
        "softmax, 0.001", "softmax, 0.002", "softmax, 0.004", "paper, 0.002"
    ]  # fmt: skip
