"""Results of an evaluation: scores with signatures, scores by document length, comparisons."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Level = Literal["sentence", "document"]
"""A segment is one sentence, or all sentences of a document joined by spaces (d-BLEU)."""
Case = Literal["mixed", "lower"]


class Score(NamedTuple):
    """One number, with everything that is needed to reproduce it."""

    name: str
    """`BLEU`, `chrF2`, `TER` or `tokenised BLEU`."""
    level: Level
    case: Case
    value: float
    signature: str

    @property
    def label(self) -> str:
        """Name with level and case, such as `d-BLEU, lower-cased`."""
        return _label(self.name, self.level) + (", lower-cased" if self.case == "lower" else "")


class LengthScore(NamedTuple):
    """d-BLEU of the documents of similar length."""

    words: str
    """Range of reference lengths in words, such as `129-256`."""
    documents: int
    value: float


class Comparison(NamedTuple):
    """Paired bootstrap test of a system against the first system."""

    name: str
    level: Level
    system: str
    baseline_value: float
    value: float
    p_value: float
    """Probability of a difference this large if both systems were equally good."""
    interval: tuple[float, float]
    """95 % confidence interval of `value - baseline_value`."""
    signature: str

    @property
    def label(self) -> str:
        """Name with level, such as `d-BLEU`."""
        return _label(self.name, self.level)


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
    """Number of documents; None if only sentences were scored."""
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


def _label(name: str, level: Level) -> str:
    return f"d-{name}" if level == "document" else name
