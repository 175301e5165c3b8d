"""Where the known corpora keep their files, below a data folder that the user names."""

from pathlib import Path
from typing import NamedTuple

from reluformer.data.text import TextPair
from reluformer.errors import UserError


class Layout(NamedTuple):
    """Where a known corpus keeps its splits: file stems below the data folder."""

    splits: dict[str, tuple[str, ...]]
    documents: bool
    keys: str | None = None


def _in_folder(folder: str, *stems: str) -> dict[str, tuple[str, ...]]:
    return {stem: (f"{folder}/{stem}",) for stem in stems}


CORPORA: dict[str, Layout] = {
    "europarl-doc": Layout(
        {
            "train": tuple(f"europarl-doc/train.{shard}" for shard in range(4)),
            **_in_folder("europarl-doc", "dev", "test", "dev.long", "test.long"),
        },
        documents=True,
        keys="docs.tsv",
    ),
    "europarl-sent": Layout(
        {"train": ("europarl-sent/train",), **_in_folder("europarl-doc", "dev", "test")},
        documents=False,
    ),
    "multi30k": Layout(
        _in_folder("multi30k", "train", "dev", "test", "test2017", "test2017coco", "test2018"),
        documents=False,
    ),
    "tatoeba": Layout(_in_folder("tatoeba", "train", "dev", "test"), documents=False),
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
    """Find the files of the corpus `name` of `CORPORA` below the folder `root`, by split.

    `shards` takes only the first so many files of the training split. `merge` joins training
    documents that belong together (the turns of one debate), where the corpus tells.
    """
    if name not in CORPORA:
        raise UserError(f"corpus is {name!r}, allowed are {', '.join(CORPORA)}")
    layout = CORPORA[name]
    if shards is not None and not 1 <= shards <= len(layout.splits["train"]):
        available = len(layout.splits["train"])
        raise UserError(f"shards is {shards}, but the training split of {name} has {available}")
    if merge and layout.keys is None:
        raise UserError(f"merge is True, but {name} does not tell which documents belong together")

    def find(stem: str, suffix: str) -> Path:
        plain = Path(root, f"{stem}.{suffix}")
        for path in (plain, Path(f"{plain}.xz"), Path(f"{plain}.gz")):
            if path.is_file():
                return path
        raise UserError(f"{plain} does not exist, nor does it with .xz or .gz, for corpus {name}")

    files = {}
    for split, stems in layout.splits.items():
        training = split == "train"
        files[split] = [
            TextPair(
                find(stem, source),
                find(stem, target),
                layout.documents,
                find(stem, layout.keys) if training and merge and layout.keys else None,
            )
            for stem in (stems[:shards] if training else stems)
        ]
    return files
