"""Cached metrics extract counts once and give sacreBLEU's scores."""

import tracemalloc
from typing import Any

import pytest
import sacrebleu
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.significance import PairedTest

from reluformer.evaluation.cached_metric import METRICS, CachedMetric, Metric

REFERENCE = ["The cat sat on the mat today.", "It was a big grey cat.", "Nobody slept at all."] * 5
GOOD = ["The cat sat on the mat yesterday.", "It was a grey cat.", "Somebody slept at all."] * 5
BAD = ["The cat on mat.", "It a big dog.", "Nobody."] * 5


def test_scores_of_all_and_of_chosen_segments() -> None:
    metric = CachedMetric("BLEU", REFERENCE, [GOOD], "13a")
    assert metric.score(GOOD) == sacrebleu.corpus_bleu(GOOD, [REFERENCE]).score
    some = sacrebleu.corpus_bleu([GOOD[0], GOOD[2]], [[REFERENCE[0], REFERENCE[2]]]).score
    assert metric.score(GOOD, [0, 2]) == some
    assert metric.signature == str(sacrebleu.BLEU(references=[REFERENCE]).get_signature())


def test_every_text_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    original = CHRF._preprocess_segment

    def spy(self: CHRF, sentence: str) -> str:
        read.append(sentence)
        return original(self, sentence)

    monkeypatch.setattr(CHRF, "_preprocess_segment", spy)
    metric = CachedMetric("chrF2", REFERENCE, [GOOD, BAD, GOOD], "13a")
    for _ in range(2):
        metric.score(GOOD)
        metric.score(BAD)
        metric.resampled([GOOD, BAD], 3)
    systems: list[Any] = [("given", GOOD), ("other", BAD)]
    _, kept = PairedTest(systems, {"chrF2": metric.metric}, None, "bs", 10)()
    assert sorted(read) == sorted(REFERENCE + GOOD + BAD)
    monkeypatch.undo()
    _, fresh = PairedTest(systems, {"chrF2": CHRF()}, [REFERENCE], "bs", 10)()
    assert str(kept) == str(fresh)


@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("name", METRICS)
def test_every_metric_equals_sacrebleu(name: Metric, lower: bool) -> None:
    texts = [GOOD, BAD, REFERENCE, [""] * 15, ["", *GOOD[1:]], [" ".join(GOOD)] * 15]
    metric = CachedMetric(name, REFERENCE, texts, "intl", lower=lower)
    fresh: dict[str, Any] = {
        "BLEU": sacrebleu.BLEU(lowercase=lower, tokenize="intl"),
        "chrF2": sacrebleu.CHRF(lowercase=lower),
        "TER": sacrebleu.TER(case_sensitive=not lower),
    }
    for text in texts:
        assert metric.score(text) == fresh[name].corpus_score(text, [REFERENCE]).score
    assert metric.signature == str(fresh[name].get_signature())


def test_the_n_grams_of_the_reference_are_freed() -> None:
    """They take a hundred times the memory of the counts."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    metric = CachedMetric("chrF2", REFERENCE * 10, [GOOD * 10], "13a")
    kept = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert metric.score(GOOD * 10) > 50
    assert kept < 2_000 * len(REFERENCE * 10)
