"""Counts are extracted once, and scores are those of sacreBLEU all the same."""

import tracemalloc
from typing import Any

import pytest
import sacrebleu
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.significance import PairedTest

from reluformer.evaluation.cached_metric import METRICS, CachedMetric, Metric

WANTED = ["The cat sat on the mat today.", "It was a big grey cat.", "Nobody slept at all."] * 5
GIVEN = ["The cat sat on the mat yesterday.", "It was a grey cat.", "Somebody slept at all."] * 5
OTHER = ["The cat on mat.", "It a big dog.", "Nobody."] * 5


def test_scores_of_all_and_of_some() -> None:
    metric = CachedMetric("BLEU", WANTED, [GIVEN], "13a")
    assert metric.score(GIVEN) == sacrebleu.corpus_bleu(GIVEN, [WANTED]).score
    some = sacrebleu.corpus_bleu([GIVEN[0], GIVEN[2]], [[WANTED[0], WANTED[2]]]).score
    assert metric.score(GIVEN, [0, 2]) == some
    assert metric.signature == str(sacrebleu.BLEU(references=[WANTED]).get_signature())


def test_every_text_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    original = CHRF._preprocess_segment

    def spy(self: CHRF, sentence: str) -> str:
        read.append(sentence)
        return original(self, sentence)

    monkeypatch.setattr(CHRF, "_preprocess_segment", spy)
    metric = CachedMetric("chrF2", WANTED, [GIVEN, OTHER, GIVEN], "13a")
    for _ in range(2):
        metric.score(GIVEN)
        metric.score(OTHER)
        metric.resampled([GIVEN, OTHER], 3)
    systems: list[Any] = [("given", GIVEN), ("other", OTHER)]
    _, kept = PairedTest(systems, {"chrF2": metric.metric}, None, "bs", 10)()
    assert sorted(read) == sorted(WANTED + GIVEN + OTHER)
    monkeypatch.undo()
    _, fresh = PairedTest(systems, {"chrF2": CHRF()}, [WANTED], "bs", 10)()
    assert str(kept) == str(fresh)


@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("name", METRICS)
def test_every_metric_is_that_of_sacrebleu(name: Metric, lower: bool) -> None:
    texts = [GIVEN, OTHER, WANTED, [""] * 15, ["", *GIVEN[1:]], [" ".join(GIVEN)] * 15]
    metric = CachedMetric(name, WANTED, texts, "intl", lower=lower)
    fresh: dict[str, Any] = {
        "BLEU": sacrebleu.BLEU(lowercase=lower, tokenize="intl"),
        "chrF2": sacrebleu.CHRF(lowercase=lower),
        "TER": sacrebleu.TER(case_sensitive=not lower),
    }
    for text in texts:
        assert metric.score(text) == fresh[name].corpus_score(text, [WANTED]).score
    assert metric.signature == str(fresh[name].get_signature())


def test_the_reference_is_not_kept() -> None:
    """Its n-grams take a hundred times the memory of the counts."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    metric = CachedMetric("chrF2", WANTED * 10, [GIVEN * 10], "13a")
    kept = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert metric.score(GIVEN * 10) > 50
    assert kept < 2_000 * len(WANTED * 10)
