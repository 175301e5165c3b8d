"""The command `quantise`."""

from pathlib import Path
from typing import Annotated

import typer


def quantise(
    run: Annotated[Path, typer.Argument(help="Folder of a run, a finished model or a checkpoint.")],
    out: Annotated[Path, typer.Option(help="Folder to create.")],
) -> None:
    """Write a model with int8 weights, faster on a CPU.

    It has a quarter of the size. For example: reluformer quantise runs/mine --out mine-int8. The
    new folder is used like that of a run: reluformer translate --model mine-int8.
    """
    from reluformer.quantise import quantise_run

    size = quantise_run(run, out)
    print(f"{out}: {size / 1e6:.1f} MB")
