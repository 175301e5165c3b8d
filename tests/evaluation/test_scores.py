"""Scores: known values, levels, cases, alignment, comparisons."""

import random
from pathlib import Path

import pytest
import sacrebleu

from reluformer.errors import UserError
from reluformer.evaluation.aligned_files import read_aligned
from reluformer.evaluation.scores import evaluate

REFERENCE = [
    ["The cat sat on the mat today.", "It was a big grey cat."],
    ["A dog barked at the moon all night.", "Nobody slept at all.", "The moon did not mind."],
]
GOOD = [
    ["The cat sat on the mat yesterday.", "It was a big grey cat."],
    ["A dog barked at the moon all night.", "Nobody slept at all.", "the Moon did not mind it."],
]
BAD = [
    ["The cat on mat.", "It a big dog."],
    ["A dog at the night.", "Nobody.", "Moon the mind did not."],
]


def values(evaluation, system: int = 0) -> dict[tuple[str, str, str], float]:
    return {(s.name, s.level, s.case): s.value for s in evaluation.systems[system].scores}


def flat(texts: list[list[str]]) -> list[str]:
    return [sentence for document in texts for sentence in document]


def test_scores_are_those_of_sacrebleu() -> None:
    found = values(evaluate(REFERENCE, {"good": GOOD}, documents=True))
    given, wanted = flat(GOOD), [flat(REFERENCE)]
    joined = [" ".join(d) for d in GOOD], [[" ".join(d) for d in REFERENCE]]
    assert found["BLEU", "sentence", "mixed"] == sacrebleu.corpus_bleu(given, wanted).score
    assert found["chrF2", "sentence", "mixed"] == sacrebleu.corpus_chrf(given, wanted).score
    assert found["TER", "sentence", "lower"] == sacrebleu.corpus_ter(given, wanted).score
    assert found["BLEU", "document", "mixed"] == sacrebleu.corpus_bleu(*joined).score
    lower = sacrebleu.corpus_bleu(given, wanted, lowercase=True).score
    assert found["BLEU", "sentence", "lower"] == lower > found["BLEU", "sentence", "mixed"]


def test_every_score_has_its_signature() -> None:
    evaluation = evaluate(REFERENCE, {"good": GOOD}, documents=True, tokenize="intl")
    for score in evaluation.systems[0].scores:
        assert ("case:lc" in score.signature) == (score.case == "lower")
        assert sacrebleu.__version__ in score.signature
        assert ("tok:intl" in score.signature) == (score.name == "BLEU")


def test_a_perfect_translation() -> None:
    found = values(evaluate(REFERENCE, {"same": REFERENCE}, documents=True))
    for (name, _, _), value in found.items():
        assert value == pytest.approx(0 if name == "TER" else 100)


def test_tokenised_bleu_is_of_the_tokenised_text_and_says_so() -> None:
    tokenised = [["A cat , here ."]], {"good": [["A cat , here !"]]}
    evaluation = evaluate([["A cat, here."]], {"good": [["A cat, here."]]}, tokenised=tokenised)
    (score,) = [s for s in evaluation.systems[0].scores if s.name == "tokenised BLEU"]
    assert "tok:none" in score.signature
    assert score.value < 100 == pytest.approx(values(evaluation)["BLEU", "sentence", "mixed"])


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


def test_systems_that_no_metric_tells_apart_do_not_differ() -> None:
    spaced = [[f" {sentence} " for sentence in document] for document in BAD * 10]
    found = evaluate(REFERENCE * 10, {"bad": BAD * 10, "spaced": spaced}, samples=50).comparisons
    assert [each.p_value for each in found] == [1.0, 1.0]


def test_an_interval_covers_what_new_text_would_show() -> None:
    # Of many corpora with the same chance of an error, about 95 % of the intervals hold the truth.
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


def test_only_the_metrics_asked_for() -> None:
    systems = {"good": GOOD, "bad": BAD}
    asked = evaluate(REFERENCE, systems, metrics=["TER", "chrF2"], samples=10)
    assert {score.name for score in asked.systems[0].scores} == {"TER", "chrF2"}
    assert {comparison.name for comparison in asked.comparisons} == {"chrF2"}
    assert not evaluate(REFERENCE, systems, metrics=["TER"]).comparisons


def test_scores_by_length_of_document() -> None:
    long = [[" ".join(f"word{i}" for i in range(n))] for n in (10, 128, 129, 2049)]
    (system,) = evaluate(long, {"same": long}, documents=True).systems
    assert [(s.words, s.documents) for s in system.by_length] == [
        ("1-128", 2),
        ("129-256", 1),
        ("over 2048", 1),
    ]


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def test_files_are_aligned_with_or_without_their_marks(tmp_path: Path) -> None:
    reference = write(tmp_path / "ref", "<d>", "a", "b", "", "c")
    marked = write(tmp_path / "marked", "", "A", "", "<d>", "C")
    plain = write(tmp_path / "plain", "A", "B", "C")
    for documents, expected in ((True, [["a", "b"], ["c"]]), (False, [["a"], ["b"], ["c"]])):
        wanted, found = read_aligned(reference, [marked, plain], documents=documents)
        assert wanted == expected
        assert found[1] == [[s.upper() for s in group] for group in expected]
        assert flat(found[0]) == ["A", "", "C"]


def test_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    reference = write(tmp_path / "ref", "<d>", "a", "b")
    with pytest.raises(UserError, match=r"short has 1 lines, but .*ref has 3, of which 2"):
        read_aligned(reference, [write(tmp_path / "short", "A")])
    with pytest.raises(UserError, match="odd, line 1 is a sentence"):
        read_aligned(reference, [write(tmp_path / "odd", "A", "B", "C")])
    with pytest.raises(UserError, match="mark, line 2 is <d>"):
        read_aligned(reference, [write(tmp_path / "mark", "<d>", "<d>", "C")])
    with pytest.raises(UserError, match="separate documents"):
        read_aligned(write(tmp_path / "flat", "a"), [], documents=True)
    with pytest.raises(UserError, match="no sentence"):
        read_aligned(write(tmp_path / "empty"), [])
    with pytest.raises(UserError, match="cannot be read"):
        read_aligned(reference, [tmp_path / "missing"])


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(UserError, match="tokenize"):
        evaluate(REFERENCE, {"good": GOOD}, tokenize="moses")
    with pytest.raises(UserError, match="metrics must be among BLEU, chrF2, TER, got .bleu."):
        evaluate(REFERENCE, {"good": GOOD}, metrics=["bleu"])
    with pytest.raises(UserError, match="samples"):
        evaluate(REFERENCE, {"good": GOOD}, samples=0)
    with pytest.raises(UserError, match="no hypothesis"):
        evaluate(REFERENCE, {})
    with pytest.raises(UserError, match="reference has no sentence"):
        evaluate([[]], {"good": [[]]})
    with pytest.raises(UserError, match="'good' has 2 sentences in 1 documents"):
        evaluate(REFERENCE, {"good": GOOD[:1]})
