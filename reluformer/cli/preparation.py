"""The command `prepare`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reluformer.cli.options import Json
from reluformer.console import progress
from reluformer.errors import UserError

if TYPE_CHECKING:
    from reluformer.data.text import TextPair

Pair = tuple[Path, Path]


def prepare(
    folder: Annotated[
        Path | None, typer.Argument(help="Folder to write; may also be given as --out.")
    ] = None,
    train: Annotated[
        Pair | None,
        typer.Option(metavar="SOURCE TARGET", help="Aligned training text, one sentence per line."),
    ] = None,
    dev: Annotated[
        Pair | None,
        typer.Option(metavar="SOURCE TARGET", help="Aligned text for validation during training."),
    ] = None,
    test: Annotated[
        Pair | None,
        typer.Option(metavar="SOURCE TARGET", help="Aligned text for the final evaluation."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write.")] = None,
    corpus: Annotated[
        str | None,
        typer.Option(
            help="Prepare a known corpus instead of files: europarl-doc, europarl-sent, multi30k "
            "or tatoeba; needs --root."
        ),
    ] = None,
    root: Annotated[
        Path | None, typer.Option(help="Folder that contains the known corpora.")
    ] = None,
    shards: Annotated[
        int | None, typer.Option(help="Use only the first N training files of the corpus.")
    ] = None,
    merge: Annotated[
        bool,
        typer.Option("--merge", help="Join consecutive training documents of one debate."),
    ] = False,
    vocab_size: Annotated[
        int | None,
        typer.Option(help="Number of subwords to learn from the training text; default 16,000."),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="Use this tokenizer.json instead of learning one; `shipped` is that of the "
            "shipped model."
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace a folder that was prepared from other files."),
    ] = False,
    json_: Json = False,
) -> None:
    """Tokenise aligned text files into a folder to train from.

    Source and target have one sentence per line. `<d>` lines or blank lines, in the same places of
    both files, separate documents. Files may be compressed (.xz, .gz).
    """
    from reluformer.data import prepare as preparing
    from reluformer.shipped import SHIPPED, shipped_model

    if (folder is None) == (out is None):
        raise UserError("prepare needs one folder to write, as its argument or as --out")
    splits = _splits({"train": train, "dev": dev, "test": test}, corpus, root, shards, merge)
    target = folder or out
    assert target is not None
    if str(tokenizer) == SHIPPED:
        tokenizer = shipped_model() / "tokenizer.json"
    with progress("sentences") as bar:
        prepared = preparing.prepare(
            target,
            splits,
            vocab_size=vocab_size,
            tokenizer=tokenizer,
            overwrite=overwrite,
            progress=bar.update,
        )
    if json_:
        print(json.dumps(prepared.manifest, indent=2))
        return
    print(f"{target}: vocabulary of {prepared.manifest['vocab_size']:,}")
    for name in prepared.splits:
        split = prepared.corpus(name)
        print(f"  {name}: {len(split):,} sentences in {len(split.documents) - 1:,} documents")


def _splits(
    pairs: dict[str, Pair | None],
    corpus: str | None,
    root: Path | None,
    shards: int | None,
    merge: bool,
) -> "dict[str, list[TextPair]]":
    """Text files of each split: the user's `pairs`, or those of a known corpus."""
    from reluformer.data.corpora import CORPORA, corpus_files
    from reluformer.data.text import TextPair

    files = {name: [TextPair(*pair)] for name, pair in pairs.items() if pair is not None}
    if corpus is None:
        if "train" not in files:
            known = ", ".join(CORPORA)
            raise UserError(f"prepare needs --train SOURCE TARGET, or --corpus, one of {known}")
        return files
    if files:
        raise UserError(f"corpus is {corpus!r}, which excludes --{next(iter(files))}")
    if root is None:
        raise UserError(f"corpus is {corpus!r}, which needs --root, the folder that contains it")
    return corpus_files(corpus, root, shards=shards, merge=merge)
