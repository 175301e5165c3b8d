"""Translation of a document, sentence by sentence, with the sentences around as context."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from reluformer.documents.formats import parse
from reluformer.documents.passage import Passage, join_parts
from reluformer.documents.projection import project
from reluformer.documents.sentences import split_sentences
from reluformer.translation.alignment import align_words, find_words
from reluformer.translation.translator import Translator

# Sentences that are translated before the next ones are started, if no limit is given.
_BLOCK = 256
# Share of the trained length that a group fills with its context.
_FILLED = 0.85


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


class _Group(NamedTuple):
    """Sentences `first` to `end` - 1, which appear together, with those from `context` on."""

    context: int
    first: int
    end: int


@dataclass(frozen=True)
class Pace:
    """Sizes of the groups of sentences that appear together, in tokens.

    Small groups appear early. A group is translated with as many sentences before it as fit the
    trained length, so that the model has their context; these are translated again for it.
    """

    first: int = 48
    """Tokens of the first group."""
    growth: float = 2.0
    """Ratio of the sizes of consecutive groups, up to half of the trained length."""


class Document:
    """A document and the translations of its sentences.

    Examples:
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
        self._translator: Translator | None = None

    def translate(
        self, translator: Translator, pace: Pace | None = None
    ) -> Iterator[TranslatedSentence]:
        """Translate all sentences and yield them in order, as soon as a group is finished.

        Args:
            translator: The model.
            pace: Sizes of groups; by default as much context as the model was trained with.
        """
        self._targets = []
        self._translator = translator
        for group in self._groups(translator, pace):
            lines = [sentence.text for sentence in self.sentences[group.context : group.end]]
            numbers = range(group.context + 1, group.end + 1)
            translated = translator.lines(
                lines, together=translator.documents, numbers=numbers, unit="sentence"
            )
            new = group.first - group.context
            lines, targets = lines[new:], [target.strip() for target in translated[new:]]
            self._targets += targets
            for index, pair in enumerate(zip(lines, targets, strict=True), group.first):
                yield TranslatedSentence(index, *pair)

    @staticmethod
    def translate_all(documents: "Sequence[Document]", translator: Translator) -> None:
        """Translate several documents in common batches; `result` has the translation of each.

        Args:
            documents: Documents, which are no context for each other.
            translator: The model.
        """
        # Blank lines separate documents.
        lines = [
            line for document in documents for line in (*(s.text for s in document.sentences), "")
        ]
        targets = iter(translator.lines(lines, together=translator.documents))
        for document in documents:
            document._translator = translator
            document._targets = [next(targets).strip() for _ in document.sentences]
            next(targets)

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
        pairs = list(zip(self.sentences, self._targets, strict=True))
        marked = [(s.text, target) for s, target in pairs if self.passages[s.passage].marks]
        aligned = iter(align_words(self._translator, marked) if self._translator else [])
        for sentence, target in pairs:
            texts[sentence.passage] += target + sentence.space
            if self.passages[sentence.passage].marks:
                start = words[sentence.passage]
                alignments[sentence.passage] += [start + word for word in next(aligned)]
                words[sentence.passage] += len(find_words(sentence.text))
        return join_parts(self.parts, list(map(project, self.passages, texts, alignments)))

    def _groups(self, translator: Translator, pace: Pace | None) -> Iterator[_Group]:
        count = len(self.sentences)
        if pace is None:
            for first in range(0, count, _BLOCK):
                yield _Group(first, first, min(first + _BLOCK, count))
            return
        texts = [sentence.text for sentence in self.sentences]
        # A separator follows each sentence.
        lengths = [len(ids) + 1 for ids in translator.tokenizer.encode_batch(texts)]
        most = int(_FILLED * translator.max_length)
        first, limit = 0, float(pace.first)
        while first < count:
            end, tokens = first + 1, lengths[first]
            while end < count and tokens + lengths[end] <= limit:
                tokens += lengths[end]
                end += 1
            context = first
            while translator.documents and context and tokens + lengths[context - 1] <= most:
                context -= 1
                tokens += lengths[context]
            yield _Group(context, first, end)
            first, limit = end, min(limit * pace.growth, most / 2)
