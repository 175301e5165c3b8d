"""Encoded corpora: all sentences of each side in one array, on disk or in memory.

Each side has `tokens`, the ids of all sentences with one `sep` after each, and `offsets`, the start
of each sentence. Sentences i to j-1 are therefore one slice, `tokens[offsets[i] : offsets[j]]`,
with separators between them and one more id, which is replaced by the end token. A document is
formed without copying. `documents` holds the first sentence of each document, and last the number
of sentences.

On disk, the arrays are little-endian files beside a manifest with their sizes and checksums. The
folder appears when it is complete. Readers memory-map the files.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from reluformer.config.schema import build
from reluformer.data.tokenizer import SEP, Tokenizer
from reluformer.errors import UserError
from reluformer.files import atomic_folder, write_json
from reluformer.reading import JSON_LIMIT, read_json_object

FORMAT = "reluformer corpus 1"
MANIFEST = "manifest.json"

Ids = NDArray[np.unsignedinteger[Any]]
Int64s = NDArray[np.int64]


FILES = ("source.tokens", "source.offsets", "target.tokens", "target.offsets", "documents")
_CHECKED = 2**20


@dataclass(frozen=True)
class _File:
    """Entry of a file in a manifest."""

    type: Literal["<u2", "<u4", "<i8"]
    size: int
    sha256: str


@dataclass(frozen=True)
class _Manifest:
    """Fields of a manifest."""

    format: str
    sentences: int
    documents: int
    source_tokens: int
    target_tokens: int
    vocab_size: int
    tokenizer: str
    files: dict[str, _File]


@dataclass(frozen=True)
class Side:
    """One language of a corpus."""

    tokens: Ids
    """Ids of all sentences, with `sep` after each."""
    offsets: Int64s
    """Start of each sentence in `tokens`, and the end of the last, [sentences + 1]."""

    def sentence(self, index: int) -> list[int]:
        """Ids of one sentence, without its separator."""
        ids: list[int] = self.tokens[self.offsets[index] : self.offsets[index + 1] - 1].tolist()
        return ids

    def lengths(self, spans: Int64s) -> Int64s:
        """Number of ids of each span of sentences, end token included; spans [n, 2], result [n]."""
        lengths: Int64s = self.offsets[spans[:, 1]] - self.offsets[spans[:, 0]]
        return lengths


@dataclass(frozen=True)
class Corpus:
    """Aligned sentences of two languages."""

    source: Side
    target: Side
    documents: Int64s
    """First sentence of each document, and last the number of sentences, [documents + 1]."""
    vocab_size: int
    tokenizer_sha256: str

    def __len__(self) -> int:
        """Number of sentence pairs."""
        return len(self.source.offsets) - 1

    @classmethod
    def open(cls, folder: Path | str) -> "Corpus":
        """Memory-map a corpus that `write_corpus` wrote; file sizes are checked."""
        folder = Path(folder)
        manifest = build(_Manifest, read_manifest(folder, FORMAT), str(folder / MANIFEST))
        for name in FILES:
            if name not in manifest.files:
                raise UserError(f"{folder / MANIFEST} has no entry {name!r}")
        arrays = [_map(folder / name, manifest.files[name]) for name in FILES]
        source, target = Side(arrays[0], arrays[1]), Side(arrays[2], arrays[3])
        corpus = cls(source, target, arrays[4], manifest.vocab_size, manifest.tokenizer)
        for name, starts, end in (
            ("source.offsets", source.offsets, len(source.tokens)),
            ("target.offsets", target.offsets, len(target.tokens)),
            ("documents", corpus.documents, len(corpus)),
        ):
            _check_starts(folder / name, starts, end)
        if len(source.offsets) != len(target.offsets):
            raise UserError(f"{folder} is damaged: its sides differ in length; prepare it again")
        return corpus

    @classmethod
    def in_memory(
        cls, documents: Iterable[Sequence[tuple[str, str]]], tokenizer: Tokenizer
    ) -> "Corpus":
        """Encode documents, each a list of (source, target) sentence pairs."""
        listed = [document for document in documents if document]

        def side(index: int) -> Side:
            texts = [pair[index] for document in listed for pair in document]
            tokens, lengths = _flatten(tokenizer.encode_batch(texts), id_dtype(tokenizer))
            return Side(tokens, _starts(lengths))

        sizes = np.array([len(document) for document in listed], dtype=np.int64)
        return cls(side(0), side(1), _starts(sizes), tokenizer.vocab_size, tokenizer.sha256)


class CorpusWriter:
    """Appends encoded sentences to the files of one corpus; `write_corpus` creates it."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        ids, counts = id_dtype(tokenizer), np.dtype("<i8")
        self._folder = folder
        self._tokenizer = tokenizer
        self._sides = [
            (_Array(folder / f"{name}.tokens", ids), _Array(folder / f"{name}.offsets", counts))
            for name in ("source", "target")
        ]
        self._documents = _Array(folder / "documents", counts)
        self._arrays = [*(array for side in self._sides for array in side), self._documents]
        self._document = -1
        self.sentences = 0

    def add(
        self, sources: list[list[int]], targets: list[list[int]], documents: Sequence[int]
    ) -> None:
        """Append aligned sentences; `documents` are their document numbers, from 0, ascending."""
        assert len(sources) == len(targets) == len(documents)
        for (tokens, offsets), sentences in zip(self._sides, (sources, targets), strict=True):
            flat, lengths = _flatten(sentences, tokens.dtype)
            offsets.append(tokens.size + _starts(lengths)[:-1])
            tokens.append(flat)
        numbers = np.array([self._document, *documents], dtype=np.int64)
        self._documents.append(self.sentences + np.flatnonzero(np.diff(numbers)))
        self._document = int(numbers[-1])
        self.sentences += len(documents)

    def finish(self) -> dict[str, Any]:
        """Complete the arrays, then write the manifest; return it."""
        documents = self._documents.size
        for tokens, offsets in self._sides:
            offsets.append(np.array([tokens.size], dtype=np.int64))
        self._documents.append(np.array([self.sentences], dtype=np.int64))
        manifest = {
            "format": FORMAT,
            "sentences": self.sentences,
            "documents": documents,
            # Without separators.
            "source_tokens": self._sides[0][0].size - self.sentences,
            "target_tokens": self._sides[1][0].size - self.sentences,
            "vocab_size": self._tokenizer.vocab_size,
            "tokenizer": self._tokenizer.sha256,
            "files": {array.path.name: array.finish() for array in self._arrays},
        }
        write_json(self._folder / MANIFEST, manifest)
        return manifest

    def close(self) -> None:
        """Close the files, complete or not."""
        for array in self._arrays:
            array.file.close()


@contextmanager
def write_corpus(folder: Path | str, tokenizer: Tokenizer) -> Iterator[CorpusWriter]:
    """Yield a writer; the complete `folder` appears when the block succeeds."""
    with (
        atomic_folder(Path(folder)) as partial,
        closing(CorpusWriter(partial, tokenizer)) as writer,
    ):
        yield writer
        writer.finish()


def read_manifest(folder: Path, format: str) -> dict[str, Any]:
    """Read the manifest of a complete folder and check its format."""
    path = folder / MANIFEST
    if not folder.exists():
        raise UserError(f"{folder} does not exist; `reluformer prepare` creates it")
    if not path.exists():
        raise UserError(
            f"{folder} is not a complete {format}: {MANIFEST} is missing; prepare it again"
        )
    manifest = read_json_object(path, JSON_LIMIT)
    actual = manifest.get("format")
    if actual != format:
        raise UserError(
            f"{path} has format {str(actual)[:80]!r}, allowed is {format!r}; prepare it again"
        )
    return manifest


def id_dtype(tokenizer: Tokenizer) -> np.dtype[Any]:
    """Smallest unsigned integer type that holds every id."""
    return np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")


class _Array:
    """An array on disk that grows by appending."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.path = path
        self.dtype = dtype
        self.size = 0
        self.file = path.open("wb")
        self._digest = hashlib.sha256()

    def append(self, values: NDArray[Any]) -> None:
        data = values.astype(self.dtype, copy=False).tobytes()
        self.file.write(data)
        self._digest.update(data)
        self.size += len(values)

    def finish(self) -> dict[str, Any]:
        self.file.close()
        return {"type": self.dtype.str, "size": self.size, "sha256": self._digest.hexdigest()}


def _map(path: Path, entry: "_File") -> NDArray[Any]:
    dtype, size = np.dtype(entry.type), entry.size
    expected = size * dtype.itemsize
    actual = path.stat().st_size if path.is_file() else None
    if actual != expected:
        state = "is missing" if actual is None else f"has {actual} bytes"
        raise UserError(f"{path} {state}, but its manifest says {expected}; prepare it again")
    if not size:
        # An empty file cannot be mapped.
        return np.empty(0, dtype)
    # A plain view is still memory-mapped, and faster to index than the memmap subclass.
    return np.asarray(np.memmap(path, dtype, mode="r", shape=(size,)))


def _check_starts(path: Path, starts: Int64s, end: int) -> None:
    """Raise UserError unless `starts` rise from 0 to `end`."""
    is_sound = len(starts) > 0 and starts[0] == 0 and starts[-1] == end
    for begin in range(0, len(starts), _CHECKED):
        # In parts, so that a large file is not copied into memory.
        is_sound = is_sound and bool((np.diff(starts[begin : begin + _CHECKED + 1]) >= 0).all())
    if not is_sound:
        raise UserError(f"{path} is damaged: its numbers do not rise to {end}; prepare it again")


def _flatten(sentences: list[list[int]], dtype: np.dtype[Any]) -> tuple[Ids, Int64s]:
    """Ids of all sentences with `sep` after each, and the lengths with separators."""
    lengths = np.array([len(sentence) + 1 for sentence in sentences], dtype=np.int64)
    flat = np.full(int(lengths.sum()), SEP, dtype=dtype)
    ends = np.cumsum(lengths) - 1
    is_text = np.ones(len(flat), dtype=bool)
    is_text[ends] = False
    flat[is_text] = np.fromiter(chain.from_iterable(sentences), dtype, len(flat) - len(lengths))
    return flat, lengths


def _starts(lengths: Int64s) -> Int64s:
    """Start of each of n consecutive pieces, and the end of the last, [n + 1]."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)])
