"""The command `inspect`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from reluformer.cli.options import Device, Json
from reluformer.errors import UserError


def inspect(
    run: Annotated[Path, typer.Argument(help="Folder of a run, a finished model or a checkpoint.")],
    text: Annotated[
        Path | None,
        typer.Option(help="Text file to inspect the model on; default: dev of the recipe's data."),
    ] = None,
    examples: Annotated[int, typer.Option(help="Number of examples to measure on.")] = 32,
    top: Annotated[
        str | None,
        typer.Option(metavar="P,P,...", help="Shares of the slots for the top-p % curve."),
    ] = None,
    maps: Annotated[
        Path | None, typer.Option(help="HTML file for interactive attention maps.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="Second model beside the first in the attention maps.")
    ] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder for plots as SVG files.")] = None,
    device: Device = None,
    json_: Json = False,
) -> None:
    """Measure the attentions and memories of a trained model.

    Variance ratios per layer, top-p % shares, anisotropy of the values, entropy, exact zeros, row
    sums, dead rows and dead slots per head. For example: reluformer inspect runs/tiny --maps
    maps.html.
    """

    from reluformer.checkpoint import load_run
    from reluformer.files import check_folder, check_outputs, write_text
    from reluformer.inspection.maps import compare_maps
    from reluformer.inspection.measure import PERCENTS, inspect_model
    from reluformer.inspection.show import plot_inspection, print_inspection
    from reluformer.inspection.texts import dev_batch, text_batch
    from reluformer.processes import find_device

    if examples < 1:
        raise UserError(f"examples must be at least 1, got {examples}")
    if against is not None and maps is None:
        raise UserError(f"against is {against}, which needs --maps")
    target = find_device(device)
    check_outputs([maps], [text])
    if plots is not None:
        check_folder(plots)
    percents = PERCENTS if top is None else _percents(top)
    loaded = load_run(run)
    other = None if against is None else load_run(against)
    loaded.model.to(target)
    batch = dev_batch(loaded, examples) if text is None else text_batch(loaded, text, examples)
    result = inspect_model(
        loaded.model, {name: tensor.to(target) for name, tensor in batch.items()}, percents
    )
    if json_:
        print(json.dumps({"model": str(run), **result.to_dict()}, indent=1))
    else:
        print_inspection(result)
    if plots is not None:
        plot_inspection(result, plots)
    if maps is not None:
        models = {run.name: loaded}
        if against is not None and other is not None:
            models[against.name if against.name != run.name else str(against)] = other
        write_text(maps, compare_maps(models, text))


def _percents(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or not all(0 < value <= 100 for value in values):
        raise UserError(f"top must be numbers above 0 and up to 100, with commas, got {text!r}")
    return values
