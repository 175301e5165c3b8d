"""The command line: prepare, recipes, train, translate, quantise, serve, evaluate, inspect,
study, report, bench, info, export-hf.

Each command is a thin layer over a function of the package, which is imported when the command
runs, so that `--help` and `--version` answer without loading torch. Exit statuses: 0 success, 1 out
of memory or a bug, 2 a mistake of the user, 3 training diverged, 130 interrupted.
"""

from typing import Annotated

import typer

from reluformer import __version__
from reluformer.cli.benchmark import bench
from reluformer.cli.evaluation import evaluate
from reluformer.cli.exporting import export_hf
from reluformer.cli.information import info
from reluformer.cli.inspection import inspect
from reluformer.cli.preparation import prepare
from reluformer.cli.quantisation import quantise
from reluformer.cli.serving import serve
from reluformer.cli.studies import report, study
from reluformer.cli.training import recipes, train
from reluformer.cli.translation import translate
from reluformer.console import CommandGroup, FileCommand, guarded

app = typer.Typer(
    cls=CommandGroup,
    help="Attention without softmax: train ReLUFormers and translate documents with them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for _command in (
    prepare, recipes, train, translate, quantise, serve, evaluate, inspect, study, report, bench,
    info, export_hf,
):  # fmt: skip
    app.command(cls=FileCommand)(guarded(_command))


def main() -> None:
    """Run the command line."""
    app(prog_name="reluformer")


def _show_version(is_requested: bool) -> None:
    if is_requested:
        print(f"reluformer {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass
