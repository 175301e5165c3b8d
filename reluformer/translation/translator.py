"""Translator: text in, text out, with a trained model.

Lines are translated one by one, or together with the other sentences of their document. However
long they are, nothing is cut off: what exceeds the trained length is translated in pieces, and a
warning says so. As many lines come out as went in.
"""

import logging
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from reluformer.data.tokenizer import Tokenizer
from reluformer.errors import UserError
from reluformer.model import ReLUFormer
from reluformer.translation.search import Hypothesis, SearchConfig, search
from reluformer.translation.segments import Layout, Span, one_line
from reluformer.translation.stream import translate_file

log = logging.getLogger("reluformer")

Precision = Literal["float32", "bfloat16"]

# Source tokens of a batch, padding included, and most rows of logits times vocabulary: enough to
# keep the device busy, and a few hundred megabytes.
_BATCH_TOKENS = {"cpu": 4096, "cuda": 32_768}
_MOST_LOGITS = 2**26


class AttentionMaps(NamedTuple):
    """Weights of every attention while one text was translated; tokens as they would be printed."""

    source: list[str]
    """S tokens, the end mark last."""
    target: list[str]
    """T tokens, the start mark first; row t of a map wrote token t + 1."""
    encoder: Tensor
    """[layers, H, S, S]."""
    decoder: Tensor
    """[layers, H, T, T]."""
    cross: Tensor
    """[layers, H, T, S]."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, weights with five decimals."""
        return {
            name: value if isinstance(value, list) else _rounded(value.tolist())
            for name, value in self._asdict().items()
        }


class Translator:
    """A model with its tokenizer and a search.

    >>> translate = Translator.load("runs/tiny")
    >>> translate("It costs three euros.")
    >>> translate(["It costs three euros.", "It leaves at noon."])
    >>> translate.document(sentences)
    """

    def __init__(
        self,
        model: ReLUFormer,
        tokenizer: Tokenizer,
        *,
        trained_length: int,
        documents: bool = True,
        config: SearchConfig | None = None,
        max_length: int | None = None,
        batch_tokens: int | None = None,
    ) -> None:
        """Wrap a model that was trained on examples of at most `trained_length` ids.

        `documents` says whether it saw several sentences together. Texts of up to `max_length` ids
        (default: as trained) are translated in one go.
        """
        self.model, self.tokenizer = model.eval(), tokenizer
        self.documents = documents
        self.config = SearchConfig() if config is None else config
        self.trained_length = trained_length
        self.max_length = trained_length if max_length is None else max_length
        if self.max_length < 2:
            raise UserError(f"max_length must be at least 2, got {max_length}")
        if self.max_length > trained_length:
            log.warning(
                "max_length is %d, but the model was trained on at most %d ids: beyond them "
                "translations may be poor",
                self.max_length,
                trained_length,
            )
        device = model.target_embedding.weight.device.type
        usual = _BATCH_TOKENS.get(device, _BATCH_TOKENS["cuda"])
        self.batch_tokens = usual if batch_tokens is None else batch_tokens
        if self.batch_tokens < 1:
            raise UserError(f"batch_tokens must be at least 1, got {batch_tokens}")
        self.on_batch: Callable[[int], None] = lambda texts: None
        """Called after each batch with the number of texts in it, for progress bars."""
        self._recorded: list[AttentionMaps] | None = None

    @classmethod
    def load(
        cls,
        path: Path | str,
        *,
        device: str | None = None,
        precision: Precision | None = None,
        max_length: int | None = None,
        batch_tokens: int | None = None,
        **search: Any,
    ) -> "Translator":
        """The translator of a run's folder, a finished model or a checkpoint.

        `device` is `cpu` or `cuda`, by default a GPU if there is one; `precision` float32 or
        bfloat16, the default on a GPU. Further keywords are fields of `SearchConfig`, in place of
        what the recipe says.
        """
        from reluformer.checkpoint import load_run

        allowed = [field.name for field in fields(SearchConfig)]
        for name in search:
            if name not in allowed:
                raise UserError(f"{name} is no setting of a search: {', '.join(allowed)}")
        run = load_run(path)
        recipe = {
            "beam": run.recipe.decode.beam,
            "length_penalty": run.recipe.decode.length_penalty,
        }
        config = SearchConfig(**{**recipe, **search})
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        precision = precision or ("float32" if device == "cpu" else "bfloat16")
        if precision not in ("float32", "bfloat16"):
            raise UserError(f"precision must be one of float32, bfloat16, got {precision!r}")
        try:
            model = run.model.to(device, getattr(torch, precision))
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(
                f"device must be usable on this machine, got {device!r}: {reason}"
            ) from None
        return cls(
            model,
            run.tokenizer,
            trained_length=run.recipe.data.max_length,
            documents=run.recipe.data.unit == "document",
            config=config,
            max_length=max_length,
            batch_tokens=batch_tokens,
        )

    @overload
    def __call__(self, text: str) -> str: ...
    @overload
    def __call__(self, text: list[str] | tuple[str, ...]) -> list[str]: ...
    def __call__(self, text: str | list[str] | tuple[str, ...]) -> str | list[str]:
        """Translate a text, or each of a list; lines of a text stay lines."""
        texts = [text] if isinstance(text, str) else list(text)
        parts = [part.split("\n") for part in texts]
        translated = iter(self.lines([line for part in parts for line in part]))
        joined = ["\n".join(next(translated) for _ in part) for part in parts]
        return joined[0] if isinstance(text, str) else joined

    @overload
    def document(self, text: str) -> str: ...
    @overload
    def document(self, text: list[str] | tuple[str, ...]) -> list[str]: ...
    def document(self, text: str | list[str] | tuple[str, ...]) -> str | list[str]:
        """Translate sentences with their neighbours in view: a list, or a text of one a line.

        Lines that are blank or `<d>` end a document and are kept.
        """
        if isinstance(text, str):
            return "\n".join(self.lines(text.split("\n"), together=True))
        return self.lines([one_line(sentence) for sentence in text], together=True)

    def file(self, source: Path | str, target: Path | str, *, document: bool = False) -> None:
        """Translate the lines of a text file (plain, .xz or .gz) into another."""
        translate_file(self, Path(source), Path(target), document=document)

    def lines(
        self,
        lines: Sequence[str],
        *,
        together: bool = False,
        numbers: Sequence[int] | None = None,
    ) -> list[str]:
        """Translate each of `lines`; blank ones stay blank.

        `together` keeps the sentences of a document in view of each other, as `document` does.
        Warnings name lines by their `numbers`, by default 1, 2, ...
        """
        numbers = range(1, len(lines) + 1) if numbers is None else numbers
        if together and not self.documents:
            log.warning("the model was trained on single sentences and translates them one by one")
        layout = Layout(
            lines,
            self.max_length - 1,
            self.tokenizer.encode_batch,
            together=together and self.documents,
            marks=together,
        )
        if layout.long:
            log.warning(
                "%d of %d lines have more than %d tokens and are translated in pieces, the first "
                "of them line %d",
                len(layout.long),
                len(lines),
                self.max_length - 1,
                numbers[layout.long[0]],
            )
        incomplete = self._fill(layout)
        if incomplete:
            log.warning(
                "%d of the translations reached the most tokens allowed and may be incomplete or "
                "repeat themselves, the first of them in line %d",
                len(incomplete),
                numbers[min(incomplete)],
            )
        return layout.translations()

    def translate_ids(
        self, sources: Sequence[Sequence[int]], *, banned: tuple[int, ...] = ()
    ) -> list[Hypothesis]:
        """Translate ids without marks, in batches of similar lengths; the order is kept."""
        found: list[Hypothesis | None] = [None] * len(sources)
        for batch in self._batches([len(source) + 1 for source in sources]):
            part = [sources[index] for index in batch]
            # The same text gets the same sample, wherever it stands.
            keys = [zlib.crc32(array("q", source).tobytes()) for source in part]
            hypotheses = search(self.model, part, self.config, banned=banned, keys=keys)
            for index, hypothesis in zip(batch, hypotheses, strict=True):
                found[index] = hypothesis
            self.on_batch(len(batch))
        return [hypothesis for hypothesis in found if hypothesis is not None]

    @contextmanager
    def recording(self) -> Iterator[list[AttentionMaps]]:
        """Within the block, the list that is yielded gets the maps of every text translated.

        A text is a line, a piece of a long one, or a part of a document of up to `max_length` ids.
        """
        self._recorded = []
        try:
            yield self._recorded
        finally:
            self._recorded = None

    def _fill(self, layout: Layout) -> list[int]:
        """Translate all spans; return the lines whose translations may be incomplete.

        A span whose translation has another number of sentences, or cannot be right for another
        reason, is translated again in halves.
        """
        incomplete: list[int] = []
        queue = layout.spans
        while queue:
            halves: list[Span] = []
            for span, source, hypothesis in self._translate(layout, queue):
                sentences = self.tokenizer.decode_document(hypothesis.tokens)
                if len(span) > 1 and not (hypothesis.complete and layout.fits(span, sentences)):
                    halves += span.halves()
                    continue
                layout.fill(span, sentences)
                if not hypothesis.complete:
                    incomplete.append(layout.owners[span.first])
                if self._recorded is not None:
                    self._recorded.append(self._maps(source, hypothesis.tokens))
            if halves:
                log.info("%d parts of documents are translated again", len(halves))
            queue = halves
        return incomplete

    def _translate(
        self, layout: Layout, spans: list[Span]
    ) -> Iterator[tuple[Span, list[int], Hypothesis]]:
        """Spans with their source ids and translations: those of several sentences first."""
        sep = self.tokenizer.sep
        for several in (True, False):
            chosen = [span for span in spans if (len(span) > 1) == several]
            sources = [layout.source(span, sep) for span in chosen]
            # The translation of one sentence is one sentence.
            found = self.translate_ids(sources, banned=() if several else (sep,))
            yield from zip(chosen, sources, found, strict=True)

    def _batches(self, lengths: list[int]) -> Iterator[list[int]]:
        """Indices of texts to translate together, longest first."""
        config = self.config
        width = 1 if config.method == "sample" else config.beam
        most_rows = max(1, _MOST_LOGITS // (width * self.model.config.vocabulary))
        batch: list[int] = []
        for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            rows = min(most_rows, self.batch_tokens // lengths[batch[0]]) if batch else 1
            if len(batch) >= max(rows, 1):
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    def _maps(self, source: Sequence[int], target: Sequence[int]) -> AttentionMaps:
        from reluformer.diagnostics import attention_maps

        bpe, device = self.tokenizer, self.model.target_embedding.weight.device
        source, target = [*source, bpe.eos], [bpe.bos, *target]
        batch = {"source": torch.tensor([source]), "target": torch.tensor([target])}
        maps = attention_maps(self.model, {k: v.to(device) for k, v in batch.items()})
        sites = {
            site: torch.stack([weights[0].cpu() for (s, _), weights in maps.items() if s == site])
            for site in ("encoder", "decoder", "cross")
        }
        return AttentionMaps(self._names(source), self._names(target), **sites)

    def _names(self, ids: Sequence[int]) -> list[str]:
        marks = {
            self.tokenizer.bos: "<bos>",
            self.tokenizer.eos: "<eos>",
            self.tokenizer.sep: "<sep>",
        }
        return [marks.get(i) or self.tokenizer.decode([i]) for i in ids]


def _rounded(values: Any) -> Any:
    return [_rounded(value) for value in values] if isinstance(values, list) else round(values, 5)
