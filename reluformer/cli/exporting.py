"""The command `export-hf`."""

from pathlib import Path
from typing import Annotated

import typer


def export_hf(
    run: Annotated[Path, typer.Argument(help="Folder of a run, a model or a checkpoint.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; it must not exist.")],
) -> None:
    """Write a trained model as a folder for transformers.

    The folder has the tokenizer, too. A program that imports reluformer.hf can load it.
    """
    from reluformer.errors import UserError

    try:
        from reluformer.hf import export_run
    except ImportError as error:
        raise UserError(
            f"export-hf needs transformers, pip install 'reluformer[hf]': {error}"
        ) from None
    print(export_run(run, out))
