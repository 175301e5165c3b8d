"""sacreBLEU metrics that extract the counts of each text once.

A score is computed from counts that add up over segments, such as matching n-grams. Extracting the
counts takes nearly all of the time, and one evaluation needs the counts of a text several times:
for the score of all segments, for documents of similar length, and in every comparison.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import numpy as np
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER

Metric = Literal["BLEU", "chrF2", "TER"]

METRICS: tuple[Metric, ...] = get_args(Metric)
_SEED = 12345

Array = np.ndarray[Any, np.dtype[Any]]


class CachedMetric:
    """One metric with one reference, and the counts of a fixed set of texts.

    This uses private methods of sacreBLEU's metrics, hence the upper bound on its version in
    pyproject.toml.

    Attributes:
        metric: The sacreBLEU metric. It returns the cached counts, also inside sacreBLEU's own
            functions such as `PairedTest`.
    """

    def __init__(
        self,
        name: Metric,
        reference: Sequence[str],
        texts: Iterable[Sequence[str]],
        tokenize: str,
        *,
        lower: bool = False,
    ) -> None:
        """Extract the counts of `texts`, each a list of segments as long as `reference`."""
        self.metric = _metric(name, [list(reference)], tokenize, lower)
        self._counts: dict[tuple[str, ...], list[list[float]]] = {
            text: self.metric._extract_corpus_statistics(text, None)
            for text in dict.fromkeys(map(tuple, texts))
        }
        # The n-grams of the reference take far more memory than all counts together.
        self.metric._ref_cache = None
        self.metric._extract_corpus_statistics = self.counts

    @property
    def signature(self) -> str:
        """sacreBLEU's signature: all settings that are needed to reproduce the score."""
        return str(self.metric.get_signature())

    def counts(self, text: Sequence[str], references: object = None) -> list[list[float]]:
        """Counts of each segment of `text`; `references` is ignored, sacreBLEU passes it."""
        return self._counts[tuple(text)]

    def score(self, text: Sequence[str], segments: Sequence[int] | None = None) -> float:
        """Score of all segments of `text`, or of the segments with the given indices."""
        counts = self.counts(text)
        chosen = counts if segments is None else [counts[index] for index in segments]
        return float(self.metric._aggregate_and_compute(chosen).score)

    def resampled(self, systems: Sequence[Sequence[str]], samples: int) -> Array:
        """Scores [systems, samples] on bootstrap samples of the segments.

        All systems are scored on the same samples. sacreBLEU's paired test draws samples in the
        same way, but does not return the differences.
        """
        return _resampled(self.metric, [np.array(self.counts(text)) for text in systems], samples)


def bleu_of_counts(counts: Array) -> float:
    """BLEU of all segments, from the counts [segments, 10] of `CachedMetric("BLEU", ...)`."""
    return float(BLEU()._compute_score_from_stats(counts.sum(axis=0).tolist()).score)


def resampled_bleu(counts: Sequence[Array], samples: int) -> Array:
    """BLEU [systems, samples] on bootstrap samples, from each system's counts [segments, 10]."""
    return _resampled(BLEU(), counts, samples)


def _resampled(metric: Any, counts: Sequence[Array], samples: int) -> Array:
    generator, size = np.random.default_rng(_SEED), len(counts[0])
    scores = np.empty((len(counts), samples))
    for sample in range(samples):
        times = np.bincount(generator.integers(size, size=size), minlength=size)
        for system, system_counts in enumerate(counts):
            totals = (times @ system_counts).tolist()
            scores[system, sample] = metric._compute_score_from_stats(totals).score
    return scores


def _metric(name: Metric, references: list[list[str]], tokenize: str, lower: bool) -> Any:
    if name == "BLEU":
        return BLEU(lowercase=lower, tokenize=tokenize, references=references)
    if name == "chrF2":
        return CHRF(lowercase=lower, references=references)
    return TER(case_sensitive=not lower, references=references)
