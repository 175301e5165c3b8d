"""Files of the known corpora, below a data folder."""

from pathlib import Path
from typing import NamedTuple

from reluformer.data.text import TextPair
from reluformer.errors import UserError


class KnownCorpus(NamedTuple):
    """Files of a known corpus."""

    splits: dict[str, tuple[str, ...]]
    """File names without the language, relative to the data folder, of each split."""
    documents: bool
    """Whether `<d>` lines separate documents."""
    keys: str | None = None
    """Suffix of the table of document keys, as in `TextPair`."""


def _in_folder(folder: str, *stems: str) -> dict[str, tuple[str, ...]]:
    return {stem: (f"{folder}/{stem}",) for stem in stems}


CORPORA: dict[str, KnownCorpus] = {
    "europarl-doc": KnownCorpus(
        {
            "train": tuple(f"europarl-doc/train.{shard}" for shard in range(4)),
            **_in_folder("europarl-doc", "dev", "test", "dev.long", "test.long"),
        },
        documents=True,
        keys="docs.tsv",
    ),
    "europarl-sent": KnownCorpus(
        {"train": ("europarl-sent/train",), **_in_folder("europarl-doc", "dev", "test")},
        documents=False,
    ),
    "multi30k": KnownCorpus(
        _in_folder("multi30k", "train", "dev", "test", "test2017", "test2017coco", "test2018"),
        documents=False,
    ),
    "tatoeba": KnownCorpus(_in_folder("tatoeba", "train", "dev", "test"), documents=False),
}


def corpus_files(
    name: str,
    root: Path | str,
    *,
    source: str = "en",
    target: str = "de",
    shards: int | None = None,
    merge: bool = False,
) -> dict[str, list[TextPair]]:
    """Find the files of a known corpus.

    Args:
        name: One of `CORPORA`.
        root: Data folder that contains the corpus.
        source: Source language, the suffix of its files.
        target: Target language, the suffix of its files.
        shards: Use only the first `shards` files of the training split; default: all.
        merge: Join consecutive training documents with equal keys, such as the turns of a debate.

    Returns:
        Aligned files of each split.
    """
    if name not in CORPORA:
        raise UserError(f"corpus must be one of {', '.join(CORPORA)}, got {name!r}")
    known = CORPORA[name]
    if shards is not None and not 1 <= shards <= len(known.splits["train"]):
        available = len(known.splits["train"])
        raise UserError(f"shards must be from 1 to {available} for {name}, got {shards}")
    if merge and known.keys is None:
        raise UserError(f"merge must be false for {name}, which has no document keys")

    def find(stem: str, suffix: str) -> Path:
        plain = Path(root, f"{stem}.{suffix}")
        for path in (plain, Path(f"{plain}.xz"), Path(f"{plain}.gz")):
            if path.is_file():
                return path
        raise UserError(f"{plain} of corpus {name} does not exist, neither plain nor as .xz or .gz")

    files = {}
    for split, stems in known.splits.items():
        training = split == "train"
        files[split] = [
            TextPair(
                find(stem, source),
                find(stem, target),
                known.documents,
                find(stem, known.keys) if training and merge and known.keys else None,
            )
            for stem in (stems[:shards] if training else stems)
        ]
    return files
