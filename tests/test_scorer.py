"""Counts are extracted once, and scores are those of sacreBLEU all the same."""

from typing import Any

import pytest
import sacrebleu
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.significance import PairedTest

from reluformer.scorer import Scorer

WANTED = ["The cat sat on the mat today.", "It was a big grey cat.", "Nobody slept at all."] * 5
GIVEN = ["The cat sat on the mat yesterday.", "It was a grey cat.", "Somebody slept at all."] * 5
OTHER = ["The cat on mat.", "It a big dog.", "Nobody."] * 5


def test_scores_of_all_and_of_some() -> None:
    scorer = Scorer("BLEU", WANTED, "13a")
    assert scorer.score(GIVEN) == sacrebleu.corpus_bleu(GIVEN, [WANTED]).score
    some = sacrebleu.corpus_bleu([GIVEN[0], GIVEN[2]], [[WANTED[0], WANTED[2]]]).score
    assert scorer.score(GIVEN, [0, 2]) == some
    assert scorer.signature == str(sacrebleu.BLEU(references=[WANTED]).get_signature())


def test_every_text_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    original = CHRF._preprocess_segment

    def spy(self: CHRF, sentence: str) -> str:
        read.append(sentence)
        return original(self, sentence)

    monkeypatch.setattr(CHRF, "_preprocess_segment", spy)
    scorer = Scorer("chrF2", WANTED, "13a")
    for _ in range(2):
        scorer.score(GIVEN)
        scorer.score(OTHER)
        scorer.resampled([GIVEN, OTHER], 3)
    systems: list[Any] = [("given", GIVEN), ("other", OTHER)]
    _, kept = PairedTest(systems, {"chrF2": scorer.metric}, None, "bs", 10)()
    assert sorted(read) == sorted(WANTED + GIVEN + OTHER)
    monkeypatch.undo()
    _, fresh = PairedTest(systems, {"chrF2": CHRF()}, [WANTED], "bs", 10)()
    assert str(kept) == str(fresh)
