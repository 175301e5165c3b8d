"""A metric of sacreBLEU that reads every text once.

A score is computed from counts that add up over segments. Extracting these takes nearly all of the
time, and one evaluation needs those of a text again and again: for its score, for that of documents
of some length, and in every comparison.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import numpy as np

Metric = Literal["BLEU", "chrF2", "TER"]

METRICS: tuple[Metric, ...] = get_args(Metric)
_SEED = 12345

Array = np.ndarray[Any, np.dtype[np.float64]]


class Scorer:
    """One metric against one reference, a list of segments, for some texts and no others."""

    def __init__(
        self,
        name: Metric,
        wanted: Sequence[str],
        texts: Iterable[Sequence[str]],
        tokenize: str,
        *,
        lower: bool = False,
    ) -> None:
        self.metric = _metric(name, [list(wanted)], tokenize, lower)
        self._known: dict[tuple[str, ...], list[list[float]]] = {
            text: self.metric._extract_corpus_statistics(text, None)
            for text in dict.fromkeys(map(tuple, texts))
        }
        # All n-grams of the reference, many times as large as all counts together.
        self.metric._ref_cache = None
        # So that sacreBLEU's own functions, its paired test among them, find what is known.
        self.metric._extract_corpus_statistics = self.counts

    @property
    def signature(self) -> str:
        """All that is needed to compute the score again."""
        return str(self.metric.get_signature())

    def counts(self, given: Sequence[str], references: object = None) -> list[list[float]]:
        """What the score is computed from, for each segment; `references` are known already."""
        return self._known[tuple(given)]

    def score(self, given: Sequence[str], chosen: Sequence[int] | None = None) -> float:
        """The score of all segments, or of those chosen."""
        counts = self.counts(given)
        some = counts if chosen is None else [counts[at] for at in chosen]
        return float(self.metric._aggregate_and_compute(some).score)

    def resampled(self, systems: Sequence[Sequence[str]], samples: int) -> Array:
        """Scores [systems, samples] on the same random draws of segments, with replacement.

        The paired test of sacreBLEU draws so too, but keeps the differences to itself.
        """
        counts = [np.array(self.counts(given)) for given in systems]
        draw, size = np.random.default_rng(_SEED), len(systems[0])
        scores = np.empty((len(systems), samples))
        for sample in range(samples):
            times = np.bincount(draw.integers(size, size=size), minlength=size)
            for at, each in enumerate(counts):
                totals = (times @ each).tolist()
                scores[at, sample] = self.metric._compute_score_from_stats(totals).score
        return scores


def _metric(name: Metric, references: list[list[str]], tokenize: str, lower: bool) -> Any:
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF
    from sacrebleu.metrics.ter import TER

    if name == "BLEU":
        return BLEU(lowercase=lower, tokenize=tokenize, references=references)
    if name == "chrF2":
        return CHRF(lowercase=lower, references=references)
    return TER(case_sensitive=not lower, references=references)
