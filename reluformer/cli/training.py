"""The commands `train` and `recipes`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from reluformer.cli.options import Json
from reluformer.console import print_definitions


def train(
    recipe: Annotated[
        str,
        typer.Argument(help="Name of a shipped recipe (see `reluformer recipes`) or a YAML file."),
    ],
    out: Annotated[
        Path, typer.Option(help="Folder of the run; repeat the command to resume the run.")
    ],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A.B=C", help="Override a field of the recipe; repeatable."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no progress.")] = False,
) -> None:
    """Train the model of a recipe, or resume an interrupted run.

    For example: reluformer train toy-reverse --out runs/toy-reverse. Under torchrun, the same
    command trains on several processes.
    """
    from reluformer.config.recipe import load_recipe
    from reluformer.train import train as run

    run(load_recipe(recipe, set_ or ()), out, quiet=quiet)


def recipes(json_: Json = False) -> None:
    """List the shipped recipes."""
    from reluformer import recipes as shipped

    summaries = {name: shipped.summary(name) for name in shipped.names()}
    if json_:
        print(json.dumps(summaries, indent=2))
        return
    print_definitions(summaries)
