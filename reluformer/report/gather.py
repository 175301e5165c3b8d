"""The contents of a report: records of studies with their findings, and single runs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reluformer import checkpoint
from reluformer.errors import UserError
from reluformer.files import real_path
from reluformer.reading import (
    JSON_LIMIT,
    LOG_LIMIT,
    parse_json,
    read_json,
    read_json_object,
    read_text,
)
from reluformer.report.curves import run_plots
from reluformer.study.cells import Outcome
from reluformer.study.definition import Results, Study
from reluformer.study.findings import Findings, Plot
from reluformer.study.record import MAPS_SUFFIX, SUFFIX, StudyRecord, find_records
from reluformer.study.registry import STUDIES
from reluformer.train import run_dir

_TINY = (
    "Budget tiny: generated text and models of two layers. Numbers of studies marked (tiny) show "
    "that the software works; they decide nothing about the claims."
)


@dataclass(frozen=True)
class StudySection:
    """One study under one budget."""

    study: Study | None
    """The definition; None for a study that was described by a file."""
    record: StudyRecord
    findings: Findings
    path: Path
    """File of the record."""
    maps: list[dict[str, Any]] = field(default_factory=list)
    """Attention maps for the interactive view."""
    remarks: list[str] = field(default_factory=list)
    """Paragraphs of `NAME.notes.md` beside the record, such as likely reasons for a verdict."""

    @property
    def name(self) -> str:
        """Name of the study, with the budget if it is not the full one."""
        study, budget = self.record.study, self.record.budget
        return study if budget == "full" else f"{study} ({budget})"

    @property
    def progress(self) -> str:
        """A sentence about cells that have not run; empty if all have ended."""
        planned = len(self.record.planned)
        left = planned - len(self.record.outcomes)
        if not left:
            return ""
        have = "has" if left == 1 else "have"
        return f"{left} of {planned} cells {have} not run; verdicts and tables are of the others."


@dataclass(frozen=True)
class RunSection:
    """One training outside any study."""

    folder: Path
    facts: list[tuple[str, str]]
    plots: list[Plot]


@dataclass(frozen=True)
class Contents:
    """Everything on a report's page."""

    studies: list[StudySection]
    runs: list[RunSection] = field(default_factory=list)

    @property
    def notice(self) -> str:
        """A warning about results that decide nothing; empty if there are none."""
        is_tiny = any(section.record.budget == "tiny" for section in self.studies)
        return _TINY if is_tiny else ""

    @property
    def unmeasured(self) -> str:
        """A sentence that names the other studies of the paper; empty without one of them."""
        recorded = {section.record.study for section in self.studies}
        names = [name for name in STUDIES if name not in recorded]
        if not names or recorded.isdisjoint(STUDIES):
            return ""
        return f"Studies without results here: {', '.join(names)}."

    @property
    def cells(self) -> dict[tuple[str, str], Outcome]:
        """Outcomes of all studies by folder and name; shared cells occur once."""
        return {
            (section.record.folder, outcome.name): outcome
            for section in self.studies
            for outcome in section.record.outcomes
        }


def gather(folders: Sequence[Path]) -> Contents:
    """Read all records and runs below some folders.

    Raises:
        UserError: A folder does not exist, is damaged, or there is nothing to report.
    """
    studies = []
    # A folder may be named twice, or with one inside it.
    records = {real_path(path): (path, record) for path, record in find_records(folders)}
    for path, record in records.values():
        with damage_named(path):
            studies.append(_section(path, record))
    order = list(STUDIES)
    studies.sort(key=lambda s: order.index(s.record.study) if s.record.study in order else 99)
    runs = []
    for folder in {real_path(folder): folder for folder in folders}.values():
        if (folder / checkpoint.RECIPE).is_file():
            with damage_named(folder):
                runs.append(_run(folder))
    if not studies and not runs:
        named = ", ".join(map(str, folders))
        raise UserError(f"{named} hold neither records of studies (*.study.json) nor a run")
    return Contents(studies, runs)


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Turn failures on values that no run or study writes into a UserError that names `path`."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is damaged: {type(error).__name__}: {error}") from None


def _section(path: Path, record: StudyRecord) -> StudySection:
    study = STUDIES.get(record.study)
    results = Results(record.outcomes, record.comparisons)
    findings = Findings([], record.tables) if study is None else study.conclude(results)
    maps = path.with_name(path.name.removesuffix(SUFFIX) + MAPS_SUFFIX)
    shown = read_json(maps, LOG_LIMIT) if maps.is_file() else []
    notes = path.with_name(path.name.removesuffix(SUFFIX) + ".notes.md")
    text = read_text(notes, JSON_LIMIT) if notes.is_file() else ""
    remarks = [part.strip() for part in text.split("\n\n") if part.strip()]
    return StudySection(study, record, findings, path, shown, remarks)


def _run(folder: Path) -> RunSection:
    metrics = folder / run_dir.METRICS
    lines = read_text(metrics, LOG_LIMIT).splitlines() if metrics.is_file() else []
    curve = [parse_json(line, metrics) for line in lines]
    described = folder / run_dir.RUN
    values: dict[str, Any] = {}
    if described.is_file():
        values = read_json_object(described, JSON_LIMIT)
    facts = [("folder", str(folder)), ("recipe", str(values.get("recipe", "unknown")))]
    starts = values.get("starts", [])
    if starts:
        facts += [(name, str(starts[-1].get(name))) for name in ("device", "commit", "time")]
    steps = [point for point in curve if "nll" in point]
    if steps:
        last = steps[-1]
        facts += [("steps", f"{last['step']:,}"), ("target tokens", f"{last['tokens']:,}")]
        facts.append(("training loss", f"{last['nll']:.3f} nats a token"))
    dev = [point["dev"] for point in steps if point.get("dev")]
    if dev:
        facts.append(("dev", ", ".join(f"{name} {value:.3f}" for name, value in dev[-1].items())))
    return RunSection(folder, facts, run_plots(curve))
