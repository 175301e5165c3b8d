"""Comparable scores: sacreBLEU with signatures, for sentences and for whole documents.

Every score states its level: a segment is one sentence, or all sentences of a document joined by
spaces (d-BLEU). Tokenised BLEU, as older papers report it, is computed from text that another
program tokenised, and is labelled as such.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from sacrebleu.metrics.bleu import BLEU

from reluformer.errors import UserError
from reluformer.evaluation.aligned_files import Documents
from reluformer.evaluation.cached_metric import METRICS, CachedMetric, Metric
from reluformer.evaluation.results import (
    Case,
    Comparison,
    Evaluation,
    LengthScore,
    Level,
    Score,
    System,
)
from reluformer.evaluation.significance import compare

TOKENIZERS = ("13a", "intl", "char", "zh", "none")
# Upper bounds of the groups of documents of similar length, in words of the reference.
_LENGTHS = (128, 256, 512, 1024, 2048)
_MOST_SAMPLES = 10**6


def evaluate(
    reference: Documents,
    hypotheses: Mapping[str, Documents],
    *,
    documents: bool = False,
    metrics: Sequence[Metric] = METRICS,
    tokenize: str = "13a",
    tokenised: tuple[Documents, Mapping[str, Documents]] | None = None,
    samples: int = 1000,
    progress: Callable[[int, int | None, str], None] | None = None,
) -> Evaluation:
    """Score the hypotheses of all systems against the reference.

    Args:
        reference: Sentences by document.
        hypotheses: Sentences by document of each system, by name. Systems after the first are
            compared with the first.
        documents: Also score whole documents.
        metrics: Metrics to compute. TER takes by far the longest; it is computed for sentences
            only and not compared.
        tokenize: sacreBLEU's tokenizer for BLEU.
        tokenised: Reference and hypotheses as another program tokenised them, for tokenised BLEU.
        samples: Number of samples of the paired bootstrap.
        progress: Called with the number of finished steps, their total, and the next step.

    Raises:
        UserError: An argument is invalid, or the shapes of reference and hypotheses differ.
    """
    _check_settings(metrics, tokenize, samples)
    _check_shapes(reference, hypotheses)
    report = progress or (lambda done, total, step: None)
    levels: tuple[Level, ...] = ("sentence", "document") if documents else ("sentence",)
    texts = {level: _Texts.of(level, reference, hypotheses, metrics, tokenize) for level in levels}
    kinds = [(level, *kind) for level in levels for kind in texts[level].kinds()]
    compared = levels if len(hypotheses) > 1 else ()
    total = len(kinds) + len(compared)
    scores: dict[str, list[Score]] = {name: [] for name in hypotheses}
    # All systems by one metric, then by the next: a metric then reads the reference once.
    for step, (level, case, metric) in enumerate(kinds):
        report(step, total, f"scoring by {level}: {metric}, {case} case")
        for name in hypotheses:
            scores[name].append(texts[level].score(name, metric, case))
    systems: list[System] = []
    for name in hypotheses:
        if tokenised is not None:
            scores[name].append(_tokenised_bleu(tokenised[0], tokenised[1][name]))
        by_length = texts["document"].by_length(name) if documents else []
        systems.append(System(name, tuple(scores[name]), tuple(by_length)))
    comparisons: list[Comparison] = []
    for step, level in enumerate(compared, len(kinds)):
        report(step, total, f"comparing by {level}")
        comparisons += texts[level].compare(samples)
    return Evaluation(
        sum(map(len, reference)),
        len(reference) if documents else None,
        tuple(systems),
        tuple(comparisons),
    )


def scores_by_length(
    metric: CachedMetric, reference: Sequence[str], hypothesis: Sequence[str]
) -> Iterator[LengthScore]:
    """Score of the segments in each range of reference lengths that occurs."""
    lengths = [len(segment.split()) for segment in reference]
    for low, high in zip((0, *_LENGTHS), (*_LENGTHS, None), strict=True):
        chosen = [i for i, n in enumerate(lengths) if low < n and (high is None or n <= high)]
        if chosen:
            words = f"{low + 1}-{high}" if high else f"over {low}"
            yield LengthScore(words, len(chosen), metric.score(hypothesis, chosen))


def _check_settings(metrics: Sequence[Metric], tokenize: str, samples: int) -> None:
    for metric in metrics:
        if metric not in METRICS:
            raise UserError(f"metrics must be among {', '.join(METRICS)}, got {metric!r}")
    if tokenize not in TOKENIZERS:
        raise UserError(f"tokenize must be one of {', '.join(TOKENIZERS)}, got {tokenize!r}")
    if not 1 <= samples <= _MOST_SAMPLES:
        raise UserError(f"samples must be from 1 to {_MOST_SAMPLES}, got {samples}")


def _check_shapes(reference: Documents, hypotheses: Mapping[str, Documents]) -> None:
    if not hypotheses:
        raise UserError("there is no hypothesis to score")
    if not any(reference):
        raise UserError("the reference has no sentence")
    shape = [len(document) for document in reference]
    for name, hypothesis in hypotheses.items():
        if [len(document) for document in hypothesis] != shape:
            raise UserError(
                f"hypothesis {name!r} has {sum(map(len, hypothesis))} sentences in "
                f"{len(hypothesis)} documents, but must have as many in each document as the "
                f"reference: {sum(shape)} in {len(shape)}"
            )


@dataclass
class _Texts:
    """Reference and hypotheses as segments of one level, with the metrics computed on them."""

    level: Level
    reference: list[str]
    hypotheses: dict[str, list[str]]
    metrics: Sequence[Metric]
    tokenize: str
    _cached: dict[tuple[Metric, Case], CachedMetric] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        level: Level,
        reference: Documents,
        hypotheses: Mapping[str, Documents],
        metrics: Sequence[Metric],
        tokenize: str,
    ) -> Self:
        """Join sentences by document into segments of `level`."""
        systems = {name: _segments(texts, level) for name, texts in hypotheses.items()}
        return cls(level, _segments(reference, level), systems, metrics, tokenize)

    def kinds(self) -> Iterator[tuple[Case, Metric]]:
        """Every metric, case-sensitive and lower-cased."""
        cases: tuple[Case, ...] = ("mixed", "lower")
        for case in cases:
            for name in METRICS:
                # TER's search for shifts would take minutes on whole documents.
                if name in self.metrics and (name != "TER" or self.level == "sentence"):
                    yield case, name

    def score(self, system: str, name: Metric, case: Case) -> Score:
        """Score of one system by one metric."""
        metric = self._metric(name, case)
        value = metric.score(self.hypotheses[system])
        return Score(name, self.level, case, value, metric.signature)

    def by_length(self, system: str) -> Iterator[LengthScore]:
        """BLEU of the segments in each range of reference lengths that occurs."""
        metric = self._metric("BLEU", "mixed")
        return scores_by_length(metric, self.reference, self.hypotheses[system])

    def compare(self, samples: int) -> Iterator[Comparison]:
        """Comparisons of every system with the first, by every metric but TER."""
        metrics: dict[Metric, CachedMetric] = {
            name: self._metric(name, "mixed")
            for name in METRICS
            if name in self.metrics and name != "TER"
        }
        return compare(self.hypotheses, metrics, self.level, samples)

    def _metric(self, name: Metric, case: Case) -> CachedMetric:
        if (name, case) not in self._cached:
            texts, lower = self.hypotheses.values(), case == "lower"
            metric = CachedMetric(name, self.reference, texts, self.tokenize, lower=lower)
            self._cached[name, case] = metric
        return self._cached[name, case]


def _segments(texts: Documents, level: Level) -> list[str]:
    if level == "document":
        return [" ".join(document) for document in texts]
    return [sentence for document in texts for sentence in document]


def _tokenised_bleu(reference: Documents, hypothesis: Documents) -> Score:
    # sacreBLEU warns of text that looks tokenised; here it is intended.
    metric = BLEU(tokenize="none", force=True)
    segments = _segments(hypothesis, "sentence")
    value = metric.corpus_score(segments, [_segments(reference, "sentence")]).score
    return Score("tokenised BLEU", "sentence", "mixed", value, str(metric.get_signature()))
