"""Translation of text with a trained model.

Lines are translated one by one, or together with the other sentences of their document. The number
of lines is preserved. Text beyond the trained length is translated in pieces, with a warning; no
text is cut off.
"""

import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, overload

from reluformer.data.tokenizer import Tokenizer
from reluformer.errors import UserError, quote
from reluformer.model import ReLUFormer
from reluformer.shipped import shipped_model
from reluformer.translation.attention_maps import AttentionMaps, compute_maps
from reluformer.translation.engine import DecoderName, Engine, Precision, TorchEngine, load_engine
from reluformer.translation.search import Hypothesis, SearchConfig
from reluformer.translation.search.task import id_arrays
from reluformer.translation.segments import SegmentedLines, Span, one_line
from reluformer.translation.stream import translate_file

log = logging.getLogger("reluformer")

# Source tokens of a batch, padding included: enough to keep the device busy.
_BATCH_TOKENS = {"cpu": 4096, "cuda": 32_768}
# Largest number of logits of one decoding step: a few hundred megabytes.
_MOST_LOGITS = 2**26


class Translator:
    """Translates text with a model, its tokenizer and a search.

    Examples:
        >>> translate = Translator.load("runs/tiny")
        >>> translate("It costs three euros.")
        >>> translate(["It costs three euros.", "It leaves at noon."])
        >>> translate.document(sentences)
    """

    def __init__(
        self,
        model: ReLUFormer | Engine,
        tokenizer: Tokenizer,
        *,
        trained_length: int,
        documents: bool = True,
        config: SearchConfig | None = None,
        batch_tokens: int | None = None,
    ) -> None:
        """Wrap a trained model.

        Args:
            model: The model, which is set to evaluation mode and runs in torch, or an engine from
                `reluformer.translation.engine`.
            tokenizer: The tokenizer that the model was trained with.
            trained_length: Length in ids of the longest training example.
            documents: Whether training examples had several sentences.
            config: Settings of the search.
            batch_tokens: Source tokens of a batch, padding included; default: by device.
        """
        self.engine: Engine = TorchEngine(model) if isinstance(model, ReLUFormer) else model
        """Computes translations of token ids."""
        self.tokenizer = tokenizer
        self.documents = documents
        self.config = SearchConfig() if config is None else config
        self.trained_length = trained_length
        longest = self.config.max_length
        self.max_length = trained_length if longest is None else longest
        if self.max_length > trained_length:
            log.warning(
                "max_length is %d, but the model was trained on at most %d ids: translations of "
                "longer texts may be poor",
                self.max_length,
                trained_length,
            )
        default = _BATCH_TOKENS.get(self.engine.device, _BATCH_TOKENS["cuda"])
        self.batch_tokens = default if batch_tokens is None else batch_tokens
        if self.batch_tokens < 1:
            raise UserError(f"batch_tokens must be at least 1, got {batch_tokens}")
        self.on_batch: Callable[[int], None] = _ignore
        """Called after each batch with the number of texts in it, for progress bars."""
        self._recorded: list[AttentionMaps] | None = None

    @classmethod
    def load(
        cls,
        path: Path | str | None = None,
        *,
        device: str | None = None,
        precision: Precision | None = None,
        decoder: DecoderName = "auto",
        batch_tokens: int | None = None,
        **search: Any,
    ) -> "Translator":
        """Load the translator of a run's folder, a finished model or a checkpoint.

        Args:
            path: Folder of the run, the model or the checkpoint; default: the shipped model.
            device: `"cpu"` or `"cuda"`; default: a GPU if there is one.
            precision: Precision of the weights: `"float32"`, `"bfloat16"`, or `"int8"` with the
                native decoder; default: bfloat16 on a GPU, as stored on a CPU.
            decoder: `"native"` is the C++ library on a CPU, `"torch"` the model in torch; `"auto"`
                is the native one where it is built and supports the model.
            batch_tokens: As in `Translator`.
            **search: Fields of `SearchConfig`; they override the recipe's.

        Raises:
            UserError: The folder has no model, or an argument is invalid.
        """
        allowed = [field.name for field in fields(SearchConfig)]
        for name in search:
            if name not in allowed:
                raise UserError(
                    f"{name} is not a setting of the search, allowed: {', '.join(allowed)}"
                )
        path = shipped_model() if path is None else path
        engine, tokenizer, recipe = load_engine(path, device, precision, decoder)
        defaults = {
            name: getattr(recipe.decode, name) for name in ("beam", "length_penalty", "max_length")
        }
        return cls(
            engine,
            tokenizer,
            trained_length=recipe.data.max_length,
            documents=recipe.data.unit == "document",
            config=SearchConfig(**{**defaults, **search}),
            batch_tokens=batch_tokens,
        )

    @property
    def model(self) -> ReLUFormer:
        """The model in torch."""
        return self.engine.model

    @overload
    def __call__(self, text: str) -> str: ...
    @overload
    def __call__(self, text: list[str] | tuple[str, ...]) -> list[str]: ...
    def __call__(self, text: str | list[str] | tuple[str, ...]) -> str | list[str]:
        """Translate texts; each line is a sentence by itself.

        Args:
            text: One text, or a list of texts.

        Returns:
            A text for a text, a list for a list, with as many lines.
        """
        texts = [text] if isinstance(text, str) else _texts(text)
        split = [text.split("\n") for text in texts]
        translated = iter(self.lines([line for lines in split for line in lines]))
        joined = ["\n".join(next(translated) for _ in lines) for lines in split]
        return joined[0] if isinstance(text, str) else joined

    @overload
    def document(self, text: str) -> str: ...
    @overload
    def document(self, text: list[str] | tuple[str, ...]) -> list[str]: ...
    def document(self, text: str | list[str] | tuple[str, ...]) -> str | list[str]:
        """Translate the sentences of a document together, each with the others as context.

        Documents longer than `max_length` are translated in parts.

        Args:
            text: A list of sentences, or a text with one sentence per line. `<d>` lines and blank
                lines separate documents and are kept.

        Returns:
            A list for a list, a text for a text, with one translation for each sentence.
        """
        if isinstance(text, str):
            return "\n".join(self.lines(text.split("\n"), together=True))
        return self.lines([one_line(sentence) for sentence in _texts(text)], together=True)

    def file(self, source: Path | str, target: Path | str, *, document: bool = False) -> None:
        """Translate the lines of a text file (plain, .xz or .gz) into another file."""
        translate_file(self, Path(source), Path(target), document=document)

    def lines(
        self,
        lines: Sequence[str],
        *,
        together: bool = False,
        numbers: Sequence[int] | None = None,
        unit: str = "line",
    ) -> list[str]:
        """Translate each line.

        Args:
            lines: Text without line ends; blank lines stay blank.
            together: Translate the sentences of a document together, as `document` does.
            numbers: Line numbers for warnings; default 1, 2, ...
            unit: What warnings call a line.
        """
        lines = _texts(lines)
        numbers = range(1, len(lines) + 1) if numbers is None else numbers
        if together and not self.documents:
            log.warning(
                "the model was trained on single sentences, which are translated one by one"
            )
        segmented = SegmentedLines(
            lines,
            self.max_length - 1,
            self.tokenizer.encode_batch,
            together=together and self.documents,
            marks=together,
        )
        if segmented.long:
            log.warning(
                "%d of %d %s(s) have more than %d tokens and are translated in pieces; the first "
                "is %s %d",
                len(segmented.long),
                len(set(numbers)),
                unit,
                self.max_length - 1,
                unit,
                numbers[segmented.long[0]],
            )
        incomplete = self._fill(segmented)
        if incomplete:
            log.warning(
                "%d translation(s) reached the maximum length and may be incomplete or repetitive; "
                "the first is in %s %d",
                len(incomplete),
                unit,
                numbers[min(incomplete)],
            )
        return segmented.translations()

    def translate_ids(
        self, sources: Sequence[Sequence[int]], *, banned: tuple[int, ...] = ()
    ) -> list[Hypothesis]:
        """Translate ids without start and end tokens, in batches of similar lengths.

        Args:
            sources: Ids of each text.
            banned: Ids that must not occur in translations.

        Returns:
            The best hypothesis of each text, in the order of `sources`.
        """
        arrays = id_arrays(sources, self.engine.config.vocabulary)
        results: list[Hypothesis | None] = [None] * len(arrays)
        for batch in self._batches([len(ids) + 1 for ids in arrays]):
            part = [arrays[index] for index in batch]
            # Equal texts get equal samples, independent of their position.
            keys = [zlib.crc32(ids.tobytes()) for ids in part]
            hypotheses = self.engine.search(part, self.config, banned, keys)
            for index, hypothesis in zip(batch, hypotheses, strict=True):
                results[index] = hypothesis
            self.on_batch(len(batch))
        return [hypothesis for hypothesis in results if hypothesis is not None]

    @contextmanager
    def recording(self) -> Iterator[list[AttentionMaps]]:
        """Record attention maps inside the block, in the list that is yielded.

        There is one entry for each translated text: a line, a piece of a long line, or a part of a
        document of up to `max_length` ids.
        """
        self._recorded = []
        try:
            yield self._recorded
        finally:
            self._recorded = None

    def _fill(self, segmented: SegmentedLines) -> list[int]:
        """Translate all spans; return the indices of lines that may be incomplete.

        A span is translated again in two halves if its translation is incomplete or cannot be
        divided into the right number of sentences.
        """
        incomplete: list[int] = []
        queue = segmented.spans
        while queue:
            halves: list[Span] = []
            for span, source, hypothesis in self._translate(segmented, queue):
                sentences = self.tokenizer.decode_document(hypothesis.tokens)
                if len(span) > 1 and not (hypothesis.complete and segmented.fits(span, sentences)):
                    halves += span.halves()
                    continue
                segmented.fill(span, sentences)
                if not hypothesis.complete:
                    incomplete.append(segmented.owners[span.first])
                if self._recorded is not None:
                    maps = compute_maps(self.model, self.tokenizer, source, hypothesis.tokens)
                    self._recorded.append(maps)
            if halves:
                log.info("%d parts of documents are translated again", len(halves))
            queue = halves
        return incomplete

    def _translate(
        self, segmented: SegmentedLines, spans: list[Span]
    ) -> Iterator[tuple[Span, list[int], Hypothesis]]:
        """Yield spans with source ids and translations, spans of several sentences first."""
        sep = self.tokenizer.sep
        for several in (True, False):
            chosen = [span for span in spans if (len(span) > 1) == several]
            sources = [segmented.source(span, sep) for span in chosen]
            # The translation of one sentence is one sentence: it has no separator.
            hypotheses = self.translate_ids(sources, banned=() if several else (sep,))
            yield from zip(chosen, sources, hypotheses, strict=True)

    def _batches(self, lengths: list[int]) -> Iterator[list[int]]:
        """Yield indices of the texts of each batch, longest texts first."""
        config = self.config
        width = 1 if config.method == "sample" else config.beam
        most_rows = max(1, _MOST_LOGITS // (width * self.engine.config.vocabulary))
        batch: list[int] = []
        for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            rows = min(most_rows, self.batch_tokens // lengths[batch[0]]) if batch else 1
            if len(batch) >= max(rows, 1):
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch


def _texts(texts: Any) -> list[str]:
    """The texts as a list; refuses a single string and everything that is not text."""
    if not isinstance(texts, str):
        try:
            listed = list(texts)
        except TypeError:
            listed = [texts]
        wrong = [text for text in listed if not isinstance(text, str)]
        if not wrong:
            return listed
        texts = wrong[0]
    raise UserError(f"text must be a string or a list of strings, got {quote(texts)}")


def _ignore(texts: int) -> None:
    """Default of `on_batch`; a lambda could not be pickled."""
