"""The command `bench`."""

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from reluformer.cli.options import Device, Json
from reluformer.console import progress
from reluformer.errors import UserError


def bench(
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny cases, to check the set-up in less than a minute.")
    ] = False,
    seconds: Annotated[float, typer.Option(help="Approximate time for all cases.")] = 480.0,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Run only cases whose name contains or matches this; repeatable.",
        ),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            help="bfloat16, float16 or float32; repeatable. Default: depends on the device."
        ),
    ] = None,
    device: Device = None,
    threads: Annotated[
        int | None, typer.Option(help="Number of CPU threads; default: all cores.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="JSON file to write, updated after every case.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Figure to write: .svg, .png or .pdf.")] = None,
    from_: Annotated[
        Path | None, typer.Option("--from", help="Show this JSON file instead of measuring.")
    ] = None,
    json_: Json = False,
) -> None:
    """Time all implementations of attention.

    An implementation is timed only if its result at the timed shape agrees with float64.
    """
    from reluformer.bench.measure import Selection, run
    from reluformer.bench.plot import check_plot
    from reluformer.bench.plot import plot as draw
    from reluformer.bench.report import Report, table
    from reluformer.files import check_outputs, write_json

    if plot is not None:
        check_plot(plot)
    check_outputs([out, plot], [from_])
    if from_ is not None:
        if out or only or dtype or device or threads or quick:
            raise UserError(f"from is {from_}, so nothing is measured; only --plot and --json fit")
        report = Report.load(from_)
    else:
        with progress("passes") as bar:
            report = run(
                Selection(device, tuple(dtype or ()), tuple(only or ()), quick),
                threads=threads,
                seconds=seconds,
                command=shlex.join(["reluformer", *sys.argv[1:]]),
                progress=bar.update,
                save=lambda report: None if out is None else write_json(out, report.to_dict()),
            )
    print(json.dumps(report.to_dict(), indent=2) if json_ else table(report))
    if plot is not None:
        draw(report, plot)
