"""Options that several commands share."""

from typing import Annotated, Literal

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Device = Annotated[
    Literal["cpu", "cuda"] | None, typer.Option(help="Default: a GPU if there is one.")
]
