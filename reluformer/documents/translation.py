"""Translation of a document, sentence by sentence, with the sentences around as context."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from reluformer.documents.formats import parse
from reluformer.documents.passage import Passage, join_parts
from reluformer.documents.projection import project
from reluformer.documents.sentences import split_sentences
from reluformer.translation.alignment import align_words, find_words, proportional_alignment
from reluformer.translation.segments import pack
from reluformer.translation.translator import Translator

# Sentences that are translated before the next ones are started, if no limit is given.
_BLOCK = 256


class Sentence(NamedTuple):
    """A sentence of a document."""

    text: str
    space: str
    """White space behind it in its passage."""
    passage: int
    """Index of its passage."""


class TranslatedSentence(NamedTuple):
    """A sentence and its translation."""

    number: int
    """Its index in the document."""
    source: str
    target: str


class Aligner(Protocol):
    """Aligns words; see `align_words`."""

    def __call__(self, source: str, target: str) -> list[int]:
        """For each word of `target`, the index of a word of `source`."""


@dataclass(frozen=True)
class Pace:
    """Tokens of the source that are translated together: the first group, and later ones.

    Small groups appear early, large groups give the model more context.
    """

    first: int = 48
    growth: float = 2.0


class Document:
    """A document and the translations of its sentences.

    >>> document = Document("A *short* text.", "markdown")
    >>> for sentence in document.translate(translator):
    ...     print(sentence.target)
    >>> document.result()
    """

    def __init__(self, text: str, name: str = "text", language: str = "en") -> None:
        """Parse a document.

        Args:
            text: The document.
            name: Its format, one of `FORMATS`.
            language: ISO 639 code of its language, for the rules of sentence splitting.
        """
        self.parts = parse(text, name)
        self.passages = [part for part in self.parts if isinstance(part, Passage)]
        self.sentences = [
            Sentence(sentence.rstrip(), sentence[len(sentence.rstrip()) :], index)
            for index, passage in enumerate(self.passages)
            for sentence in split_sentences(passage.text, language)
        ]
        self._targets: list[str] = []
        self._aligner: Aligner = proportional_alignment

    def translate(
        self, translator: Translator, pace: Pace | None = None
    ) -> Iterator[TranslatedSentence]:
        """Translate all sentences and yield them in order, as soon as a group is finished.

        Args:
            translator: The model.
            pace: Sizes of groups; by default as much context as the model was trained with.
        """
        self._targets = []
        self._aligner = lambda source, target: align_words(translator, source, target)
        for first, end in self._groups(translator, pace):
            lines = [sentence.text for sentence in self.sentences[first:end]]
            # A document mark in running text is not a mark.
            targets = translator.lines(lines, together=translator.documents)
            self._targets += targets
            for index, pair in enumerate(zip(lines, targets, strict=True), first):
                yield TranslatedSentence(index, *pair)

    def result(self) -> str:
        """The translated document.

        Raises:
            ValueError: Not all sentences have been translated.
        """
        if len(self._targets) < len(self.sentences):
            raise ValueError(f"only {len(self._targets)} of {len(self.sentences)} are translated")
        texts = [""] * len(self.passages)
        alignments: list[list[int]] = [[] for _ in self.passages]
        words = [0] * len(self.passages)
        for sentence, target in zip(self.sentences, self._targets, strict=True):
            texts[sentence.passage] += target + sentence.space
            if self.passages[sentence.passage].marks:
                aligned = self._aligner(sentence.text, target)
                start = words[sentence.passage]
                alignments[sentence.passage] += [start + word for word in aligned]
                words[sentence.passage] += len(find_words(sentence.text))
        return join_parts(self.parts, list(map(project, self.passages, texts, alignments)))

    def _groups(self, translator: Translator, pace: Pace | None) -> Iterator[tuple[int, int]]:
        """First and last sentence, the latter exclusive, of groups that are translated together."""
        count = len(self.sentences)
        if pace is None:
            yield from ((first, min(first + _BLOCK, count)) for first in range(0, count, _BLOCK))
            return
        lengths = [
            len(ids) for ids in translator.tokenizer.encode_batch([s.text for s in self.sentences])
        ]
        first, limit = 0, float(pace.first)
        while first < count:
            span = pack(lengths[first : first + _BLOCK], int(limit))[0]
            yield first, first + len(span)
            first += len(span)
            limit = min(limit * pace.growth, translator.max_length)
