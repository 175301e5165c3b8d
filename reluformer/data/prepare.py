"""Preparation of text files for training: tokenizer, encoded splits, plain dev and test text.

A prepared folder contains `tokenizer.json`, a corpus folder for each split, the text of every split
but train (`dev.source.txt`, `dev.target.txt`, ...) for scoring, and a manifest. Text is streamed
twice: the first pass checks and counts all lines and samples some for the tokenizer, the second
pass encodes. The folder appears when it is complete.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from random import Random
from typing import Any

from reluformer.data.corpus import FILES as CORPUS_FILES
from reluformer.data.corpus import FORMAT as CORPUS
from reluformer.data.corpus import MANIFEST, Corpus, read_manifest, write_corpus
from reluformer.data.text import Sentence, TextPair, read_documents, read_sentences, write_documents
from reluformer.data.tokenizer import Tokenizer, check_vocab_size
from reluformer.errors import UserError
from reluformer.files import atomic_folder, real_path, remove_partials, sha256, write_json
from reluformer.locks import lock_file
from reluformer.reading import JSON_LIMIT, read_json

_ANY_FORMAT = "reluformer prepared data"
FORMAT = f"{_ANY_FORMAT} 1"
VOCAB_SIZE = 16_000

Progress = Callable[[int, int | None, str], None]
"""Called with the number of finished sentences, their total if known, and the current activity."""
Splits = Mapping[str, Sequence[TextPair]]
"""Text files of each split, by name."""

_TOKENIZER = "tokenizer.json"
_CHUNK = 8192
# A larger sample hardly changes the vocabulary, and this one is small in memory.
_SAMPLE_PAIRS = 200_000
_SAMPLE_CHARACTERS = 1000


@dataclass(frozen=True)
class Prepared:
    """A complete prepared folder."""

    folder: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, folder: Path | str) -> "Prepared":
        """Read the manifest of a folder that `prepare` completed."""
        manifest = read_manifest(Path(folder), FORMAT)
        splits = manifest.get("splits")
        if not isinstance(splits, dict) or not all(
            isinstance(split, dict) and type(split.get("marked")) is bool
            for split in splits.values()
        ):
            raise UserError(f"{Path(folder) / MANIFEST} is damaged: it does not describe splits")
        for split in splits:
            _check_name(split)
        return cls(Path(folder), manifest)

    def check(self) -> None:
        """Raise UserError unless all files are there and readable."""
        if self.tokenizer().sha256 != self.manifest.get("tokenizer"):
            raise UserError(f"{self.folder / _TOKENIZER} is not the tokenizer of the manifest")
        for split in self.splits:
            self.corpus(split)
            for file in _text_files(self.folder, split) if split != "train" else ():
                if not file.is_file():
                    raise UserError(f"{file} is missing")

    @property
    def splits(self) -> list[str]:
        """Names of the splits, in the order they were given."""
        return list(self.manifest["splits"])

    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer of all splits."""
        return Tokenizer.load(self.folder / _TOKENIZER)

    def corpus(self, split: str) -> Corpus:
        """Memory-map an encoded split."""
        self._check(split, self.splits)
        return Corpus.open(self.folder / split)

    def documents(self, split: str) -> Iterator[list[tuple[str, str]]]:
        """Yield the plain (source, target) pairs of each document of a split other than train."""
        self._check(split, [name for name in self.splits if name != "train"])
        marked = self.manifest["splits"][split]["marked"]
        return read_documents(TextPair(*_text_files(self.folder, split), documents=marked))

    def _check(self, split: str, allowed: list[str]) -> None:
        if split not in allowed:
            raise UserError(
                f"split must be one of {', '.join(allowed)} in {self.folder}, got {split!r}"
            )


def prepare(
    folder: Path | str,
    splits: Splits,
    *,
    vocab_size: int | None = None,
    tokenizer: Path | str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Prepared:
    """Tokenise and encode the aligned files of each split.

    A folder that was completed from the same files and options is returned unchanged.

    Args:
        folder: Folder to write; it appears when it is complete.
        splits: Text files of each split; `train` must be among them.
        vocab_size: Size of the vocabulary that is learnt from `train`; default 16,000.
        tokenizer: Tokenizer file to use instead of learning one.
        overwrite: Replace a folder that was prepared from other files or options.
        progress: Receives the progress.

    Raises:
        UserError: An argument is invalid, a text file is faulty, or `folder` is in use.
    """
    folder = Path(folder)
    request = _request(splits, vocab_size, tokenizer)
    # The folder may be a symbolic link.
    target = real_path(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = target.with_name(f".{target.name}.lock")
    with lock_file(lock, f"{folder} is being prepared by another process", remove=True):
        existing = _existing(folder, request, overwrite=overwrite)
        if existing is not None:
            return existing
        # Leftovers of a killed preparation.
        remove_partials(target.parent, of=target.name)
        with atomic_folder(folder) as partial:
            manifest = _build(partial, splits, request, tokenizer, progress or _silent)
    return Prepared(folder, manifest)


def _build(
    folder: Path,
    splits: Splits,
    request: dict[str, Any],
    tokenizer: Path | str | None,
    report: Progress,
) -> dict[str, Any]:
    """Fill `folder`, write the manifest last, and return it."""
    counts, sample = _survey(splits, report, sampling=tokenizer is None)
    if tokenizer is None:
        report(0, None, "learning the vocabulary")
        bpe = Tokenizer.train(sample, request["vocab_size"])
    else:
        bpe = Tokenizer.load(tokenizer)
    del sample
    bpe.save(folder / _TOKENIZER)
    done, total = 0, sum(sentences for sentences, _ in counts.values())
    described = {}
    for split, pairs in splits.items():
        sentences, documents = counts[split]
        # No marks are needed if every document has one sentence.
        marked = documents < sentences
        if split != "train":
            grouped = groupby(_sentences(pairs), key=lambda sentence: sentence.document)
            plain = ((sentence[:2] for sentence in group) for _, group in grouped)
            write_documents(*_text_files(folder, split), plain, marked=marked)
        for encoded in _encode(folder / split, pairs, bpe):
            done += encoded
            report(done, total, f"encoding {split}")
        described[split] = {**read_manifest(folder / split, CORPUS), "marked": marked}
    manifest = {
        "format": FORMAT,
        "request": request,
        "tokenizer": bpe.sha256,
        "vocab_size": bpe.vocab_size,
        "splits": described,
    }
    write_json(folder / MANIFEST, manifest)
    return manifest


def _silent(done: int, total: int | None, text: str) -> None:
    pass


def _request(
    splits: Splits, vocab_size: int | None, tokenizer: Path | str | None
) -> dict[str, Any]:
    """Check the arguments; return a description that is equal for equal preparations."""
    if "train" not in splits:
        raise UserError(f"splits must include train, got {', '.join(splits) or 'none'}")
    for split, pairs in splits.items():
        _check_name(split)
        if not pairs:
            raise UserError(f"split {split} has no files")
    if vocab_size is not None and tokenizer is not None:
        raise UserError(
            f"vocab_size must not be given with tokenizer {tokenizer}, got {vocab_size}"
        )
    if vocab_size is not None:
        check_vocab_size(vocab_size)
    return {
        "vocab_size": VOCAB_SIZE if tokenizer is None and vocab_size is None else vocab_size,
        "tokenizer": None if tokenizer is None else _identity(Path(tokenizer)),
        "splits": {
            split: [
                {
                    "source": _identity(files.source),
                    "target": _identity(files.target),
                    "documents": files.documents,
                    "keys": None if files.keys is None else _identity(files.keys),
                }
                for files in pairs
            ]
            for split, pairs in splits.items()
        },
    }


def _check_name(split: str) -> None:
    if not re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9._-]*", split):
        raise UserError(
            f"split must consist of letters, digits, '.', '_' and '-', got {split[:80]!r}"
        )


def _identity(path: Path | str) -> dict[str, str]:
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path} is not a file")
    try:
        return {"name": path.name, "sha256": sha256(path)}
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None


def _existing(folder: Path, request: dict[str, Any], *, overwrite: bool) -> Prepared | None:
    """Complete data of the same request in `folder`; None if the folder may be written.

    Raises:
        UserError: The folder holds anything else, and `overwrite` does not allow to replace it.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    if not (folder / MANIFEST).exists() or not _holds_only_prepared_files(folder):
        raise UserError(f"{folder} exists and is not a prepared folder; choose another")
    try:
        prepared = Prepared.open(folder)
        is_same = prepared.manifest.get("request") == request
        if is_same:
            prepared.check()
            return prepared
    except UserError as error:
        if overwrite:
            return None
        raise UserError(f"{error}; overwrite the folder to prepare it again") from None
    if not overwrite:
        raise UserError(
            f"{folder} was prepared from other files or options; choose another folder or "
            "overwrite it"
        )
    return None


def _holds_only_prepared_files(folder: Path) -> bool:
    """Whether `folder` holds prepared data, perhaps damaged, and nothing else."""
    try:
        if not str(read_json(folder / MANIFEST, JSON_LIMIT)["format"]).startswith(_ANY_FORMAT):
            return False
    except (UserError, LookupError, TypeError):
        # A damaged manifest: the names of the files decide.
        pass
    texts = (".source.txt", ".target.txt")
    return all(
        {file.name for file in path.iterdir()} <= {*CORPUS_FILES, MANIFEST}
        if path.is_dir()
        else path.name in (MANIFEST, _TOKENIZER) or path.name.endswith(texts)
        for path in folder.iterdir()
    )


def _sentences(pairs: Sequence[TextPair]) -> Iterator[Sentence]:
    """Yield the sentences of all files of a split, with consecutive document numbers."""
    base = 0
    for files in pairs:
        last = -1
        for source, target, document in read_sentences(files):
            last = document
            yield Sentence(source, target, base + document)
        base += last + 1


def _survey(
    splits: Splits, report: Progress, *, sampling: bool
) -> tuple[dict[str, tuple[int, int]], list[str]]:
    """Read all text once: (sentences, documents) of each split, and sample lines of train."""
    counts = {}
    sample: list[tuple[str, str]] = []
    rng, lines_read = Random(0), 0
    for split, pairs in splits.items():
        sentences, documents, latest = 0, 0, -1
        for source, target, document in _sentences(pairs):
            if sampling and split == "train":
                pair = source[:_SAMPLE_CHARACTERS], target[:_SAMPLE_CHARACTERS]
                _keep(sample, pair, sentences, rng)
            documents += document != latest
            latest = document
            sentences += 1
            lines_read += 1
            if lines_read % _CHUNK == 0:
                report(lines_read, None, f"checking {split}")
        if not sentences:
            names = ", ".join(str(files.source) for files in pairs)
            raise UserError(f"split {split} has no sentence in {names}")
        counts[split] = sentences, documents
    return counts, [line for pair in sample for line in pair]


def _keep(sample: list[tuple[str, str]], pair: tuple[str, str], seen: int, rng: Random) -> None:
    # Reservoir sampling: every pair seen so far is in the sample with the same probability.
    if len(sample) < _SAMPLE_PAIRS:
        sample.append(pair)
    elif (slot := rng.randrange(seen + 1)) < _SAMPLE_PAIRS:
        sample[slot] = pair


def _encode(folder: Path, pairs: Sequence[TextPair], tokenizer: Tokenizer) -> Iterator[int]:
    """Write the corpus of a split; yield the number of sentences of each chunk."""
    stream = _sentences(pairs)
    with write_corpus(folder, tokenizer) as writer:
        while chunk := list(islice(stream, _CHUNK)):
            sources, targets, documents = zip(*chunk, strict=True)
            source_ids, target_ids = map(tokenizer.encode_batch, (sources, targets))
            writer.add(source_ids, target_ids, documents)
            yield len(chunk)


def _text_files(folder: Path, split: str) -> tuple[Path, Path]:
    return folder / f"{split}.source.txt", folder / f"{split}.target.txt"
