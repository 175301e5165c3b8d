"""The record of a study: everything that reports and coverage read, as one JSON file."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from reluformer.config.schema import build
from reluformer.errors import UserError
from reluformer.files import write_text
from reluformer.info import machine
from reluformer.reading import JSON_LIMIT, parse_json, read_text
from reluformer.study.cells import Outcome
from reluformer.study.findings import Comparison, Table

SUFFIX = ".study.json"
MAPS_SUFFIX = ".maps.json"
"""Attention maps of a study, beside its record."""


@dataclass(frozen=True)
class StudyRecord:
    """Outcomes and comparisons of one study under one budget."""

    study: str
    budget: str
    date: str
    command: str
    commit: str | None
    machine: dict[str, Any]
    folder: str
    """Folder of the cells at the time of the run."""
    planned: list[str]
    """Names of all cells, ended or not."""
    outcomes: list[Outcome]
    comparisons: list[Comparison] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Cells of the last call that failed, and why."""
    tables: list[Table] = field(default_factory=list)
    """Tables as printed, with means and deviations over seeds."""

    def with_origin(self, earlier: "StudyRecord") -> "StudyRecord":
        """This record with the command, date and commit of an earlier one of the same cells."""
        if [o.name for o in self.outcomes] != [o.name for o in earlier.outcomes]:
            return self
        return replace(self, command=earlier.command, date=earlier.date, commit=earlier.commit)

    def save(self, path: Path) -> None:
        """Write the record as JSON with one line a cell.

        Measures of single heads stay in the cells' own files.
        """
        values = asdict(self)
        cells = [json.dumps(_without_heads(outcome)) for outcome in values.pop("outcomes")]
        text = json.dumps(values, indent=1).removesuffix("\n}")
        lines = ",\n".join(f"  {cell}" for cell in cells)
        write_text(path, f'{text},\n "outcomes": [\n{lines}\n ]\n}}\n')

    @classmethod
    def load(cls, path: Path) -> "StudyRecord":
        """The record in a JSON file."""
        text = read_text(path, JSON_LIMIT)
        try:
            return build(cls, parse_json(text, path))
        except UserError as error:
            raise UserError(f"{path} is no record of a study: {error}") from None


def device_minutes(outcomes: Iterable[Outcome]) -> str:
    """Minutes of the device that cells took, and how many cells have no time, in words."""
    # Cells whose start has diverged did not run and have no detail.
    seconds = [o.device_seconds for o in outcomes if o.finished or o.detail]
    text = f"{sum(seconds) / 60:.1f} device minutes"
    unknown = seconds.count(0)
    return f"{text} (cells without a recorded time: {unknown})" if unknown else text


def machine_of(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Versions and devices of the cells; of this machine if no cell has ended."""
    for outcome in outcomes:
        if "machine" in outcome.detail:
            return dict(outcome.detail["machine"])
    return machine()


def _without_heads(outcome: dict[str, Any]) -> dict[str, Any]:
    inspection = outcome["detail"].get("inspection")
    if inspection is None:
        return outcome
    attentions = [
        {name: value for name, value in attention.items() if name != "heads"}
        for attention in inspection["attentions"]
    ]
    detail = {**outcome["detail"], "inspection": {**inspection, "attentions": attentions}}
    return {**outcome, "detail": detail}


def find_records(folders: Sequence[Path]) -> Iterator[tuple[Path, StudyRecord]]:
    """Records in some folders, at any depth, or files named directly."""
    for folder in folders:
        if folder.is_file():
            yield folder, StudyRecord.load(folder)
            continue
        if not folder.is_dir():
            raise UserError(f"{folder} does not exist")
        for path in sorted(folder.rglob(f"*{SUFFIX}")):
            yield path, StudyRecord.load(path)
