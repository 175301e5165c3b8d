"""Paired bootstrap: p-values, intervals and determinism."""

import random

from reluformer.evaluation.scores import evaluate
from tests.evaluation.texts import BAD, GOOD, REFERENCE


def test_systems_are_compared_with_the_first() -> None:
    many = {name: texts * 10 for name, texts in {"bad": BAD, "good": GOOD, "twin": BAD}.items()}
    evaluation = evaluate(REFERENCE * 10, many, samples=200)
    found = {(c.name, c.system): c for c in evaluation.comparisons}
    assert found["BLEU", "good"].p_value < 0.02 < 1.0 == found["BLEU", "twin"].p_value
    assert found["BLEU", "good"].value > found["BLEU", "good"].baseline_value
    assert "bs:200" in found["chrF2", "good"].signature
    low, high = found["BLEU", "good"].interval
    gain = found["BLEU", "good"].value - found["BLEU", "good"].baseline_value
    assert 0 < low < gain < high
    assert found["BLEU", "twin"].interval == found["chrF2", "twin"].interval == (0.0, 0.0)
    again = evaluate(REFERENCE * 10, many, samples=200)
    assert again == evaluation


def test_systems_with_equal_counts_do_not_differ() -> None:
    spaced = [[f" {sentence} " for sentence in document] for document in BAD * 10]
    found = evaluate(REFERENCE * 10, {"bad": BAD * 10, "spaced": spaced}, samples=50).comparisons
    assert [each.p_value for each in found] == [1.0, 1.0]


def test_intervals_cover_the_true_difference() -> None:
    # Both systems have the same error rate, so about 95 % of the intervals contain 0.
    rng = random.Random(0)

    def corpus(errors: float) -> list[list[str]]:
        words = [["no" if rng.random() < errors else "yes" for _ in range(12)] for _ in range(60)]
        return [[" ".join(line)] for line in words]

    wanted = [["yes " * 11 + "yes"]] * 60
    inside = 0
    for _ in range(20):
        systems = {"base": corpus(0.2), "same": corpus(0.2)}
        found = evaluate(wanted, systems, metrics=["BLEU"], samples=100).comparisons
        low, high = found[0].interval
        inside += low <= 0 <= high
    assert inside >= 15
