"""Scores that others can compare: sacreBLEU with signatures, by sentence and by document.

Texts have one sentence a line; `<d>` lines and blank lines in the reference separate documents.
Every score names its level: a sentence is one segment, or all sentences of a document joined by
spaces are one (d-BLEU). Tokenised BLEU, as old papers report it, is computed from text that was
tokenised elsewhere, and labelled.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, cast

import numpy as np

from reluformer.data.text import DOCUMENT, lines
from reluformer.errors import UserError
from reluformer.evaluation.fast_metrics import METRICS, Metric, Scorer

Level = Literal["sentence", "document"]
Case = Literal["mixed", "lower"]

TOKENIZERS = ("13a", "intl", "char", "zh", "none")
# Upper bounds of the groups of documents, in words of the reference.
_LENGTHS = (128, 256, 512, 1024, 2048)


class Score(NamedTuple):
    """One number, with all that is needed to compute it again."""

    name: str
    """`BLEU`, `chrF2`, `TER` or `tokenised BLEU`."""
    level: Level
    case: Case
    value: float
    signature: str


class LengthScore(NamedTuple):
    """d-BLEU of the documents of some length."""

    words: str
    """Range of words of the reference, such as `129-256`."""
    documents: int
    value: float


class Comparison(NamedTuple):
    """Paired bootstrap between the first system and another."""

    name: str
    level: Level
    system: str
    baseline_value: float
    value: float
    p_value: float
    """Probability of such a difference if both were equally good."""
    interval: tuple[float, float]
    """95 % interval of `value - baseline_value`."""
    signature: str


@dataclass(frozen=True)
class System:
    """All scores of one system."""

    name: str
    scores: tuple[Score, ...]
    by_length: tuple[LengthScore, ...]


@dataclass(frozen=True)
class Evaluation:
    """All scores of all systems; the first system is the baseline of the comparisons."""

    sentences: int
    documents: int | None
    systems: tuple[System, ...]
    comparisons: tuple[Comparison, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "sentences": self.sentences,
            "documents": self.documents,
            "systems": [
                {
                    "name": system.name,
                    "scores": [score._asdict() for score in system.scores],
                    "by_length": [score._asdict() for score in system.by_length],
                }
                for system in self.systems
            ],
            "comparisons": [comparison._asdict() for comparison in self.comparisons],
        }


Documents = list[list[str]]
"""Sentences by document; without documents, each alone in its own."""


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
    """Score every system's sentences against the reference's, document by document.

    `documents` adds scores on whole documents. Of the metrics, TER takes by far the longest and is
    only computed by sentence; comparisons are by the others. `tokenised` are the reference and the
    systems' outputs as tokenised elsewhere. Several systems are compared with the first by paired
    bootstrap of so many `samples`. `progress` is told what is done, of how much, and what is next.
    """
    for metric in metrics:
        if metric not in METRICS:
            raise UserError(f"metrics must be among {', '.join(METRICS)}, got {metric!r}")
    if tokenize not in TOKENIZERS:
        raise UserError(f"tokenize must be one of {', '.join(TOKENIZERS)}, got {tokenize!r}")
    if samples < 1:
        raise UserError(f"samples must be at least 1, got {samples}")
    if not hypotheses:
        raise UserError("there is no hypothesis to score")
    if not any(reference):
        raise UserError("the reference has no sentence")
    report = progress or (lambda done, total, text: None)
    levels: tuple[Level, ...] = ("sentence", "document") if documents else ("sentence",)
    shape = [len(document) for document in reference]
    for name, hypothesis in hypotheses.items():
        if [len(document) for document in hypothesis] != shape:
            raise UserError(
                f"hypothesis {name!r} has {sum(map(len, hypothesis))} sentences in "
                f"{len(hypothesis)} documents, not as many in each as the reference: "
                f"{sum(shape)} in {len(shape)}"
            )
    texts = {level: _Texts.of(level, reference, hypotheses, metrics, tokenize) for level in levels}
    kinds = [(level, *kind) for level in levels for kind in texts[level].kinds()]
    compared = levels if len(hypotheses) > 1 else ()
    total = len(kinds) + len(compared)
    scores: dict[str, list[Score]] = {name: [] for name in hypotheses}
    # All systems by one metric, then by the next: so it reads the reference once.
    for number, (level, case, metric) in enumerate(kinds):
        report(number, total, f"scoring by {level}: {metric}, {case} case")
        for name in hypotheses:
            scores[name].append(texts[level].score(name, metric, case))
    systems: list[System] = []
    for name in hypotheses:
        if tokenised is not None:
            scores[name].append(_tokenised(tokenised[0], tokenised[1][name]))
        by_length = texts["document"].by_length(name) if documents else []
        systems.append(System(name, tuple(scores[name]), tuple(by_length)))
    comparisons: list[Comparison] = []
    for number, level in enumerate(compared, len(kinds)):
        report(number, total, f"comparing by {level}")
        comparisons += texts[level].compare(samples)
    return Evaluation(
        sum(map(len, reference)),
        len(reference) if documents else None,
        tuple(systems),
        tuple(comparisons),
    )


def read_aligned(
    reference: Path | str, hypotheses: Sequence[Path | str], *, documents: bool = False
) -> tuple[Documents, list[Documents]]:
    """The reference and each hypothesis as sentences by document.

    Where the reference has a `<d>` line or a blank line, a hypothesis has one too, or it leaves out
    all of them. An empty line in place of a sentence is an empty translation.
    """
    wanted = list(lines(reference))
    borders = [line.strip() in ("", DOCUMENT) for line in wanted]
    if not borders.count(False):
        raise UserError(f"{reference} has no sentence")
    if documents and not any(borders):
        raise UserError(f"{reference} has no {DOCUMENT} line or blank line to separate documents")
    found = [_align(Path(reference), borders, Path(path)) for path in hypotheses]
    sentences = [line for line, border in zip(wanted, borders, strict=True) if not border]
    return (
        _group(sentences, borders, documents),
        [_group(hypothesis, borders, documents) for hypothesis in found],
    )


def _align(reference: Path, borders: list[bool], path: Path) -> list[str]:
    """The lines of `path` that translate sentences of the reference."""
    given = list(lines(path))
    sentences = borders.count(False)
    if len(given) == sentences and not any(line.strip() == DOCUMENT for line in given):
        return given
    if len(given) != len(borders):
        raise UserError(
            f"{path} has {len(given)} lines, but {reference} has {len(borders)}, of which "
            f"{sentences} are sentences"
        )
    for number, (line, border) in enumerate(zip(given, borders, strict=True), 1):
        if border and line.strip() not in ("", DOCUMENT):
            raise UserError(f"{path}, line {number} is a sentence where {reference} has none")
        if not border and line.strip() == DOCUMENT:
            raise UserError(f"{path}, line {number} is {DOCUMENT} where {reference} has a sentence")
    return [line for line, border in zip(given, borders, strict=True) if not border]


def _group(sentences: list[str], borders: list[bool], documents: bool) -> Documents:
    if not documents:
        return [[sentence] for sentence in sentences]
    groups: Documents = [[]]
    rest = iter(sentences)
    for border in borders:
        if border:
            groups.append([])
        else:
            groups[-1].append(next(rest))
    return [group for group in groups if group]


def _segments(texts: Documents, level: Level) -> list[str]:
    if level == "document":
        return [" ".join(document) for document in texts]
    return [sentence for document in texts for sentence in document]


@dataclass
class _Texts:
    """All texts as segments of one level, and what is asked about them."""

    level: Level
    wanted: list[str]
    given: dict[str, list[str]]
    metrics: Sequence[Metric]
    tokenize: str
    _scorers: dict[tuple[Metric, Case], Scorer] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        level: Level,
        reference: Documents,
        hypotheses: Mapping[str, Documents],
        metrics: Sequence[Metric],
        tokenize: str,
    ) -> Self:
        """Of texts by document."""
        given = {name: _segments(texts, level) for name, texts in hypotheses.items()}
        return cls(level, _segments(reference, level), given, metrics, tokenize)

    def kinds(self) -> Iterator[tuple[Case, Metric]]:
        """Every metric, with and without case."""
        cases: tuple[Case, ...] = ("mixed", "lower")
        for case in cases:
            for name in METRICS:
                # TER's search for shifts would take minutes on whole documents.
                if name in self.metrics and (name != "TER" or self.level == "sentence"):
                    yield case, name

    def score(self, system: str, name: Metric, case: Case) -> Score:
        """One score of one system."""
        scorer = self._scorer(name, case)
        value = scorer.score(self.given[system])
        return Score(name, self.level, case, value, scorer.signature)

    def by_length(self, system: str) -> Iterator[LengthScore]:
        """BLEU of the segments in each range of lengths that has any."""
        lengths = [len(segment.split()) for segment in self.wanted]
        for low, high in zip((0, *_LENGTHS), (*_LENGTHS, None), strict=True):
            chosen = [at for at, n in enumerate(lengths) if low < n and (high is None or n <= high)]
            if chosen:
                value = self._scorer("BLEU", "mixed").score(self.given[system], chosen)
                words = f"{low + 1}-{high}" if high else f"over {low}"
                yield LengthScore(words, len(chosen), value)

    def compare(self, samples: int) -> Iterator[Comparison]:
        """Every system but the first with the first, by every metric but TER."""
        from sacrebleu.significance import PairedTest

        names = [name for name in METRICS if name in self.metrics and name != "TER"]
        if not names:
            return
        named: list[Any] = list(self.given.items())
        scorers = {name: self._scorer(name, "mixed") for name in names}
        metrics: Any = {name: scorer.metric for name, scorer in scorers.items()}
        test = PairedTest(named, metrics, None, test_type="bs", n_samples=samples)
        signatures, results = cast("tuple[dict[str, Any], dict[str, Any]]", test())
        for name, scorer in scorers.items():
            baseline, *others = results[name]
            resampled = scorer.resampled([given for _, given in named], samples)
            counts = [scorer.counts(given) for _, given in named]
            for at, ((system, _), other) in enumerate(zip(named[1:], others, strict=True), 1):
                # The test counts differences above the one found: equal systems look different.
                p_value = 1.0 if counts[at] == counts[0] else other.p_value
                low, high = np.percentile(resampled[at] - resampled[0], [2.5, 97.5])
                yield Comparison(
                    name,
                    self.level,
                    system,
                    baseline.score,
                    other.score,
                    p_value,
                    (float(low), float(high)),
                    str(signatures[name]),
                )

    def _scorer(self, name: Metric, case: Case) -> Scorer:
        if (name, case) not in self._scorers:
            texts = self.given.values()
            made = Scorer(name, self.wanted, texts, self.tokenize, lower=case == "lower")
            self._scorers[name, case] = made
        return self._scorers[name, case]


def _tokenised(reference: Documents, hypothesis: Documents) -> Score:
    from sacrebleu.metrics.bleu import BLEU

    # Text that looks tokenised would be warned of; here it is meant.
    metric = BLEU(tokenize="none", force=True)
    given, wanted = _segments(hypothesis, "sentence"), [_segments(reference, "sentence")]
    value = metric.corpus_score(given, wanted).score
    return Score("tokenised BLEU", "sentence", "mixed", value, str(metric.get_signature()))
