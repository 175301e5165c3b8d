"""The commands `study` and `report`."""

import math
from pathlib import Path
from typing import Annotated

import typer

from reluformer.console import FAILURE, print_definitions
from reluformer.errors import UserError

_MOST_JOBS = 256


def study(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Names of studies, or all; see --list."),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the studies.")] = False,
    file: Annotated[
        Path | None, typer.Option(help="YAML file with recipe, common and runs instead of a name.")
    ] = None,
    budget: Annotated[
        str, typer.Option(help="tiny (CPU, minutes), short (8 GB GPU) or full (paper's sizes).")
    ] = "full",
    seeds: Annotated[
        str | None,
        typer.Option(metavar="S,S,...", help="Seeds of the cells that have several."),
    ] = None,
    jobs: Annotated[int, typer.Option(help="Cells that run at the same time.")] = 1,
    minutes: Annotated[
        float | None,
        typer.Option(help="Stop after this time; the next call goes on. 0 shows what is needed."),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]FOLDER",
            help="Folder with the prepared corpora, or of one corpus; repeatable. Default: data.",
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A.B=C", help="Setting of all trainings; repeatable."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN", help="Run only cells with such names; repeatable, in this order."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the cells; repeat the command to resume.")
    ] = None,
) -> None:
    """Test the paper's claims by experiments, or resume them.

    Every training is a cell in a folder of its own; cells that have ended are never run again.
    Several studies share one queue. The exit status is 1 if a cell failed. For example: reluformer
    study ffn slots --budget tiny --jobs 2 --out studies.
    """
    if list_:
        from reluformer.study.questions import QUESTIONS

        print_definitions(QUESTIONS)
        return
    from reluformer.config.yaml_lines import parse_assignments
    from reluformer.study.budgets import lookup_budget
    from reluformer.study.registry import lookup_studies, study_from_file
    from reluformer.study.runner import RunOptions, run_studies
    from reluformer.study.show import print_record

    if (not names) == (file is None):
        raise UserError("study needs a name or --file; see --list")
    if out is None:
        raise UserError("study needs --out, the folder of its cells")
    if not 1 <= jobs <= _MOST_JOBS:
        raise UserError(f"jobs must be from 1 to {_MOST_JOBS}, got {jobs}")
    if minutes is not None and not (minutes >= 0 and math.isfinite(minutes)):
        raise UserError(f"minutes must be a finite number of at least 0, got {minutes}")
    # A mistake is reported before any file is written.
    parse_assignments(set_ or ())
    chosen = [study_from_file(file)] if file is not None else lookup_studies(names or ())
    size = lookup_budget(budget)
    if seeds is not None:
        size = size.with_seeds(_numbers(seeds))
    options = RunOptions(
        out, size, jobs, minutes, tuple(data or ()), tuple(set_ or ()), tuple(only or ())
    )
    records = run_studies(chosen, options)
    if minutes == 0:
        # Only what the studies need was asked for.
        return
    for one, record in zip(chosen, records, strict=True):
        print_record(one, record)
    if any(record.failed for record in records):
        raise typer.Exit(FAILURE)


def report(
    folders: Annotated[
        list[Path], typer.Argument(help="Folders of studies or runs, or JSON files of studies.")
    ],
    out: Annotated[Path, typer.Option(help="HTML file to write.")],
    markdown: Annotated[Path | None, typer.Option(help="Also write Markdown here.")] = None,
) -> None:
    """Write one HTML page about studies.

    It has verdicts, tables, plots and attention maps, and needs no other file. For example:
    reluformer report studies --out report.html.
    """
    from reluformer.files import check_outputs, write_text
    from reluformer.report.gather import gather
    from reluformer.report.html import html_report
    from reluformer.report.markdown import markdown_report

    check_outputs([out, markdown], folders)
    contents = gather(folders)
    write_text(out, html_report(contents))
    if markdown is not None:
        write_text(markdown, markdown_report(contents))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"seeds must be whole numbers with commas, got {text!r}") from None
