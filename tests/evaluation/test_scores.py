"""Scores: known values, levels, cases and signatures."""

import pytest
import sacrebleu

from reluformer.errors import UserError
from reluformer.evaluation.scores import evaluate
from tests.evaluation.texts import BAD, GOOD, REFERENCE, flat


def values(evaluation, system: int = 0) -> dict[tuple[str, str, str], float]:
    return {(s.name, s.level, s.case): s.value for s in evaluation.systems[system].scores}


def test_scores_equal_sacrebleu() -> None:
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


def test_tokenised_bleu_uses_the_tokenised_text_and_is_labelled() -> None:
    tokenised = [["A cat , here ."]], {"good": [["A cat , here !"]]}
    evaluation = evaluate([["A cat, here."]], {"good": [["A cat, here."]]}, tokenised=tokenised)
    (score,) = [s for s in evaluation.systems[0].scores if s.name == "tokenised BLEU"]
    assert "tok:none" in score.signature
    assert score.value < 100 == pytest.approx(values(evaluation)["BLEU", "sentence", "mixed"])


def test_only_the_requested_metrics_are_computed() -> None:
    systems = {"good": GOOD, "bad": BAD}
    asked = evaluate(REFERENCE, systems, metrics=["TER", "chrF2"], samples=10)
    assert {score.name for score in asked.systems[0].scores} == {"TER", "chrF2"}
    assert {comparison.name for comparison in asked.comparisons} == {"chrF2"}
    assert not evaluate(REFERENCE, systems, metrics=["TER"]).comparisons


def test_scores_by_document_length() -> None:
    long = [[" ".join(f"word{i}" for i in range(n))] for n in (10, 128, 129, 2049)]
    (system,) = evaluate(long, {"same": long}, documents=True).systems
    assert [(s.words, s.documents) for s in system.by_length] == [
        ("1-128", 2),
        ("129-256", 1),
        ("over 2048", 1),
    ]


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(UserError, match="tokenize"):
        evaluate(REFERENCE, {"good": GOOD}, tokenize="moses")
    with pytest.raises(UserError, match="metrics must be among BLEU, chrF2, TER, got .bleu."):
        evaluate(REFERENCE, {"good": GOOD}, metrics=["bleu"])
    for samples in (0, 10**12):
        with pytest.raises(UserError, match="samples must be from 1 to 1000000"):
            evaluate(REFERENCE, {"good": GOOD}, samples=samples)
    with pytest.raises(UserError, match="no hypothesis"):
        evaluate(REFERENCE, {})
    with pytest.raises(UserError, match="reference has no sentence"):
        evaluate([[]], {"good": [[]]})
    with pytest.raises(UserError, match="'good' has 2 sentences in 1 documents"):
        evaluate(REFERENCE, {"good": GOOD[:1]})
