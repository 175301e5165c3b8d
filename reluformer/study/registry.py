"""All studies by name, and studies that are described by a YAML file."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reluformer.config.yaml_lines import read_yaml_values
from reluformer.errors import UserError, shorten
from reluformer.study.catalogue import (
    attention,
    centralisation,
    context,
    extrapolation,
    family,
    ffn,
    large_data,
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
        context, large_data, sensitivity, family,
    )
}  # fmt: skip

_NAME = re.compile(r"\w[\w.+-]*")


def lookup_study(name: str) -> Study:
    """The study called `name`."""
    if name not in STUDIES:
        raise UserError(f"study must be one of {', '.join(STUDIES)}, got {name!r}")
    return STUDIES[name]


def lookup_studies(names: Sequence[str]) -> list[Study]:
    """The studies with some names, each once; `all` stands for every study."""
    chosen = [name for part in names for name in (STUDIES if part == "all" else (part,))]
    return [lookup_study(name) for name in dict.fromkeys(chosen)]


def study_from_file(path: Path) -> Study:
    """A study without claims from a YAML file.

    The file has `recipe`, `common` (settings of all runs) and `runs` (settings by name). A run
    whose `train.start_from` ends in the name of another run starts from that run.
    """
    if path.stem in STUDIES:
        raise UserError(f"{path}: a file must not have the name of the study {path.stem}")
    values = _read(path)
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
    """The fields of a file, checked: `recipe`, `common` and `runs`."""
    values = read_yaml_values(path, allow_pipe=True)
    for name in ("recipe", "runs"):
        if name not in values:
            raise UserError(f"{path} has no field {name!r}")
    recipe, common, runs = values["recipe"], values.get("common") or {}, values["runs"]
    if not isinstance(recipe, str):
        raise UserError(f"{path}: recipe must be a name or a file, got {shorten(recipe)}")
    if not isinstance(runs, dict) or not runs:
        raise UserError(f"{path}: runs must be settings by name, got {shorten(runs)}")
    for name in runs:
        # Names of runs are names of folders.
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UserError(f"{path}: a run needs a name of letters, digits, . _ + -, got {name!r}")
    for name, settings in [("common", common), *runs.items()]:
        if settings is not None and not isinstance(settings, dict):
            raise UserError(f"{path}: {name} must be settings by field, got {shorten(settings)}")
    return {"recipe": recipe, "common": common, "runs": runs}


def _cell(study: str, name: str, values: dict[str, Any]) -> Cell:
    settings = {**values["common"], **(values["runs"][name] or {})}
    start = settings.get("train.start_from")
    parent = None
    if isinstance(start, str) and Path(start).name in values["runs"]:
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
