"""The work behind the requests: translations, streams of sentences, attention maps."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from reluformer.documents.translation import Document, Pace
from reluformer.errors import UserError
from reluformer.inspection.maps import pack_maps
from reluformer.reading import read_text
from reluformer.serve.jobs import Emit, Refused
from reluformer.serve.metrics import Metrics
from reluformer.serve.twin import read_twin_maps
from reluformer.shipped import DEMO_DOCUMENT, TWIN_MAPS
from reluformer.translation.attention_maps import compute_maps
from reluformer.translation.translator import Translator

# English names of languages that models are often trained for.
_NAMES = {
    "ar": "Arabic", "cs": "Czech", "de": "German", "en": "English", "es": "Spanish",
    "fi": "Finnish", "fr": "French", "it": "Italian", "nl": "Dutch", "pl": "Polish",
    "pt": "Portuguese", "ro": "Romanian", "ru": "Russian", "sv": "Swedish", "tr": "Turkish",
    "uk": "Ukrainian", "zh": "Chinese",
}  # fmt: skip

_CODE = re.compile(r"[A-Za-z]{2,8}([-_][A-Za-z0-9]{1,8})*")


@dataclass(frozen=True)
class Demo:
    """The demo document of a model, and maps of its softmax twin."""

    text: str
    twin: dict[str, Any]
    """Name of the twin, and its maps by sentence."""

    @classmethod
    def load(cls, folder: Path) -> "Demo | None":
        """Demo of a model's folder, or None if it has none."""
        if not (folder / DEMO_DOCUMENT).is_file():
            return None
        text = read_text(folder / DEMO_DOCUMENT, 2**16)
        if not (folder / TWIN_MAPS).is_file():
            return cls(text, {})
        return cls(text, read_twin_maps(folder / TWIN_MAPS))


@dataclass(frozen=True)
class Service:
    """A translator with its languages; functions for `Jobs.start`."""

    translator: Translator
    name: str
    """Name of the model on the page."""
    metrics: Metrics
    source: str = "en"
    target: str = "de"
    """ISO 639 codes."""
    map_tokens: int = 256
    """Most tokens of a sentence whose maps are computed."""
    demo: Demo | None = None

    def __post_init__(self) -> None:
        """Check the codes of the languages, which appear on the page and in the API."""
        for name in ("source", "target"):
            code = getattr(self, name)
            if not _CODE.fullmatch(code):
                raise UserError(f"{name} must be a code such as en or pt-BR, got {code!r}")

    def languages(self) -> list[dict[str, Any]]:
        """Languages with the targets of each, as LibreTranslate lists them."""
        targets = {self.source: [self.target], self.target: []}
        return [
            {"code": code, "name": _NAMES.get(code, code), "targets": targets[code]}
            for code in targets
        ]

    def translate(self, texts: Sequence[str], format_name: str) -> Callable[[Emit], None]:
        """Work that emits the translated texts as one list."""

        def work(emit: Emit) -> None:
            documents = [Document(text, format_name, self.source) for text in texts]
            Document.translate_all(documents, self.translator)
            for sentence in (sentence for document in documents for sentence in document.sentences):
                self.metrics.count_sentences(1, len(sentence.text))
            emit([document.result() for document in documents])

        return work

    def stream(self, text: str, format_name: str) -> Callable[[Emit], None]:
        """Work that emits events: `start`, one `sentence` for each sentence, and `done`."""

        def work(emit: Emit) -> None:
            document = Document(text, format_name, self.source)
            passages = [sentence.passage for sentence in document.sentences]
            emit({"event": "start", "passages": passages})
            for sentence in document.translate(self.translator, Pace()):
                self.metrics.count_sentences(1, len(sentence.source))
                emit({"event": "sentence", **sentence._asdict()})
            emit({"event": "done", "text": document.result()})

        return work

    def maps(self, source: str, target: str) -> Callable[[Emit], None]:
        """Work that emits the attention maps of a sentence and its translation."""

        def work(emit: Emit) -> None:
            emit(self._maps(source, target))

        return work

    def _maps(self, source: str, target: str) -> dict[str, Any]:
        tokenizer = self.translator.tokenizer
        source_ids = tokenizer.encode(source)
        target_ids, places = tokenizer.encode_with_places(target)
        tokens = max(len(source_ids), len(target_ids))
        if tokens > self.map_tokens:
            raise Refused(
                413,
                f"the sentence has {tokens} tokens; maps are shown for up to {self.map_tokens}",
            )
        with torch.inference_mode():
            maps = compute_maps(self.translator.model, tokenizer, source_ids, target_ids)
        text = pack_maps(source, maps)
        text["predicted"] = [*text["target"][1:], "<eos>"]
        models = [{"name": self.name, "texts": [text]}]
        twin = self.demo.twin if self.demo else {}
        if source in twin.get("maps", {}):
            models.append({"name": twin["name"], "texts": [twin["maps"][source]]})
        return {"models": models, "rows": _rows_of_words(target, places)}


def _rows_of_words(text: str, places: Sequence[tuple[int, int]]) -> list[int]:
    """For each word between blanks, the row of a map that predicts its first token."""
    rows, position = [], 0
    for word in text.split():
        start = text.index(word, position)
        position = start + len(word)
        # The token that contains the first character; it may begin with the blank.
        rows.append(next(row for row, (_, end) in enumerate(places) if end > start))
    return rows
