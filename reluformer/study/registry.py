"""All studies by name, and studies that are described by a YAML file."""

from pathlib import Path
from typing import Any

import yaml

from reluformer.errors import UserError
from reluformer.study.catalogue import (
    attention,
    centralisation,
    context,
    extrapolation,
    family,
    ffn,
    lengths,
    sensitivity,
    slots,
    temperature,
    theory,
)
from reluformer.study.catalogue.tables import curves, decimals, group_table
from reluformer.study.cells import Cell
from reluformer.study.definition import Contrast, Results, Study
from reluformer.study.findings import Findings

STUDIES: dict[str, Study] = {
    module.STUDY.name: module.STUDY
    for module in (
        theory, ffn, slots, temperature, centralisation, attention, lengths, extrapolation,
        context, sensitivity, family,
    )
}  # fmt: skip


def lookup_study(name: str) -> Study:
    """The study called `name`."""
    if name not in STUDIES:
        raise UserError(f"study must be one of {', '.join(STUDIES)}, got {name!r}")
    return STUDIES[name]


def study_from_file(path: Path) -> Study:
    """A study without claims from a YAML file.

    The file has `recipe`, `common` (settings of all runs) and `runs` (settings by name). A run
    whose `train.start_from` ends in the name of another run starts from that run.
    """
    values = _read(path)
    for name in ("recipe", "runs"):
        if name not in values:
            raise UserError(f"{path} has no field {name!r}")
    cells = [_cell(path.stem, name, values) for name in values["runs"]]
    names = ", ".join(values["runs"])
    return Study(
        path.stem,
        f"Runs of {path.name}: {names}",
        "",
        lambda _: cells,
        _conclude,
        Contrast(("run",), {"run": cells[0].labels["run"]}),
    )


def _read(path: Path) -> dict[str, Any]:
    """A YAML mapping, in which runs may override the fields that they merge (`<<`)."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold fields, got {type(values).__name__}")
    return values


def _cell(study: str, name: str, values: dict[str, Any]) -> Cell:
    settings = {**(values.get("common") or {}), **(values["runs"][name] or {})}
    start = settings.get("train.start_from")
    parent = None
    if start is not None and Path(start).name in values["runs"]:
        parent = f"{study}.{Path(start).name}"
        del settings["train.start_from"]
    labels = {"run": name, "seed": settings.get("train.seed", 1)}
    return Cell(
        f"{study}.{name}", labels, recipe=values["recipe"], settings=settings, parent=parent
    )


def _conclude(results: Results) -> Findings:
    columns = {
        "train nll": ("train_nll", decimals(3)),
        "dev nll": ("dev_nll", decimals(3)),
        "BLEU": ("bleu", decimals(2)),
        "entropy, cross": ("entropy_cross", decimals(2)),
        "zeros, cross": ("zeros_cross", decimals(2)),
        "dead rows, cross": ("dead_rows_cross", decimals(2)),
    }
    table = group_table("Runs", results, ("run",), columns, ("test", "sentence"))
    return Findings([], [table], [curves(results.outcomes, lambda o: str(o.labels["run"]))])
