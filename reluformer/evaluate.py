"""Scores that others can compare: sacreBLEU with signatures, by sentence and by document.

Texts have one sentence a line; `<d>` lines and blank lines in the reference separate documents.
Every score names its level: a sentence is one segment, or all sentences of a document joined by
spaces are one (d-BLEU). Tokenised BLEU, as old papers report it, is computed from text that was
tokenised elsewhere, and labelled.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np

from reluformer.data.text import DOCUMENT, lines
from reluformer.errors import UserError

Level = Literal["sentence", "document"]
Metric = Literal["BLEU", "chrF2", "TER"]

METRICS: tuple[Metric, ...] = get_args(Metric)
TOKENIZERS = ("13a", "intl", "char", "zh", "none")
_SEED = 12345
# Upper bounds of the groups of documents, in words of the reference.
_LENGTHS = (128, 256, 512, 1024, 2048)


class Score(NamedTuple):
    """One number, with all that is needed to compute it again."""

    name: str
    """`BLEU`, `chrF2`, `TER` or `tokenised BLEU`."""
    level: Level
    case: Literal["mixed", "lower"]
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
    report = progress or (lambda done, total, text: None)
    levels: tuple[Level, ...] = ("sentence", "document") if documents else ("sentence",)
    compared = levels if len(hypotheses) > 1 else ()
    total = len(hypotheses) + len(compared)
    systems: list[System] = []
    shape = [len(document) for document in reference]
    for name, hypothesis in hypotheses.items():
        if [len(document) for document in hypothesis] != shape:
            raise UserError(
                f"hypothesis {name!r} has {sum(map(len, hypothesis))} sentences in "
                f"{len(hypothesis)} documents, not as many in each as the reference: "
                f"{sum(shape)} in {len(shape)}"
            )
        scores: list[Score] = []
        for level in levels:
            for score in _scores(reference, hypothesis, level, metrics, tokenize):
                scores.append(score)
                report(len(systems), total, f"scoring {name}: {score.name}")
        if tokenised is not None:
            scores.append(_tokenised(tokenised[0], tokenised[1][name]))
        by_length = _by_length(reference, hypothesis, tokenize) if documents else []
        systems.append(System(name, tuple(scores), tuple(by_length)))
    comparisons: list[Comparison] = []
    for number, level in enumerate(compared, len(systems)):
        report(number, total, f"comparing by {level}")
        comparisons += _compare(reference, hypotheses, level, metrics, tokenize, samples)
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


def _scores(
    reference: Documents,
    hypothesis: Documents,
    level: Level,
    metrics: Sequence[Metric],
    tokenize: str,
) -> Iterator[Score]:
    given, wanted = _segments(hypothesis, level), [_segments(reference, level)]
    for case in ("mixed", "lower"):
        for name in METRICS:
            # TER's search for shifts would take minutes on whole documents.
            if name in metrics and (name != "TER" or level == "sentence"):
                metric = _metric(name, tokenize, lower=case == "lower")
                value = metric.corpus_score(given, wanted).score
                yield Score(name, level, case, value, str(metric.get_signature()))


def _metric(name: Metric, tokenize: str, *, lower: bool = False) -> Any:
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF
    from sacrebleu.metrics.ter import TER

    if name == "BLEU":
        return BLEU(lowercase=lower, tokenize=tokenize)
    return CHRF(lowercase=lower) if name == "chrF2" else TER(case_sensitive=not lower)


def _tokenised(reference: Documents, hypothesis: Documents) -> Score:
    from sacrebleu.metrics.bleu import BLEU

    # Text that looks tokenised would be warned of; here it is meant.
    metric = BLEU(tokenize="none", force=True)
    given, wanted = _segments(hypothesis, "sentence"), [_segments(reference, "sentence")]
    value = metric.corpus_score(given, wanted).score
    return Score("tokenised BLEU", "sentence", "mixed", value, str(metric.get_signature()))


def _by_length(reference: Documents, hypothesis: Documents, tokenize: str) -> Iterator[LengthScore]:
    from sacrebleu.metrics.bleu import BLEU

    pairs = list(
        zip(_segments(hypothesis, "document"), _segments(reference, "document"), strict=True)
    )
    for low, high in zip((0, *_LENGTHS), (*_LENGTHS, None), strict=True):
        chosen = [
            pair
            for pair in pairs
            if low < len(pair[1].split()) and (high is None or len(pair[1].split()) <= high)
        ]
        if chosen:
            given, wanted = zip(*chosen, strict=True)
            value = BLEU(tokenize=tokenize).corpus_score(list(given), [list(wanted)]).score
            words = f"{low + 1}-{high}" if high else f"over {low}"
            yield LengthScore(words, len(chosen), value)


def _compare(
    reference: Documents,
    hypotheses: Mapping[str, Documents],
    level: Level,
    metrics: Sequence[Metric],
    tokenize: str,
    samples: int,
) -> Iterator[Comparison]:
    from sacrebleu.significance import PairedTest

    named: list[Any] = [(name, _segments(texts, level)) for name, texts in hypotheses.items()]
    scorers = {name: _metric(name, tokenize) for name in METRICS if name in metrics}
    scorers.pop("TER", None)
    if not scorers:
        return
    wanted = [_segments(reference, level)]
    test = PairedTest(named, cast("Any", scorers), wanted, test_type="bs", n_samples=samples)
    signatures, results = cast("tuple[dict[str, Any], dict[str, Any]]", test())
    for metric, scorer in scorers.items():
        baseline, *others = results[metric]
        resampled = _resampled(scorer, [segments for _, segments in named], wanted, samples)
        for at, ((name, segments), other) in enumerate(zip(named[1:], others, strict=True), 1):
            # The test counts differences above the one found, and so calls equal systems different.
            p_value = 1.0 if segments == named[0][1] else other.p_value
            low, high = np.percentile(resampled[at] - resampled[0], [2.5, 97.5])
            yield Comparison(
                metric,
                level,
                name,
                baseline.score,
                other.score,
                p_value,
                (float(low), float(high)),
                str(signatures[metric]),
            )


def _resampled(
    scorer: Any, systems: Sequence[Sequence[str]], wanted: list[list[str]], samples: int
) -> "np.ndarray[Any, np.dtype[np.float64]]":
    """Scores [systems, samples] on the same random draws of segments, with replacement.

    A score is computed from counts that add up over segments, so a draw is a sum of rows. The
    paired test of sacreBLEU works so too, but keeps the differences to itself.
    """
    counts = [np.array(scorer._extract_corpus_statistics(each, wanted)) for each in systems]
    draw, size = np.random.default_rng(_SEED), len(wanted[0])
    scores = np.empty((len(systems), samples))
    for sample in range(samples):
        times = np.bincount(draw.integers(size, size=size), minlength=size)
        for at, each in enumerate(counts):
            totals = (times @ each).tolist()
            scores[at, sample] = scorer._compute_score_from_stats(totals).score
    return scores
