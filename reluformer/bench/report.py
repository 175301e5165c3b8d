"""Results of a run: rows, checks and environment, as JSON and as Markdown tables."""

import datetime
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from reluformer.bench.cases import Case, Mode
from reluformer.bench.gate import Check
from reluformer.config.schema import build
from reluformer.errors import UserError
from reluformer.info import commit, info
from reluformer.reading import JSON_LIMIT, parse_json, read_text

MATMUL = "matmul"


@dataclass(frozen=True)
class Row:
    """Times of one implementation, or of the matrix product, in one pass of one case."""

    case: str
    mode: Mode
    name: str
    kind: str
    ms: float
    """Median over the rounds; `low` and `high` are the extremes."""
    low: float
    high: float
    pairs: int
    """Number of rounds, and so of pairs behind each ratio."""
    tflops: float | None = None
    x_softmax: float | None = None
    """Speed relative to the best softmax kernel: the median of the ratios within a round."""
    of_matmul: float | None = None
    """TFLOP/s as a share of the matrix product's, median of the rounds."""
    relative: float | None = None
    """For features: time as a multiple of the plain call's, per unit of work."""
    gbytes: float | None = None
    """For decoding: gigabytes of keys and values read per second."""
    host_us: float | None = None
    """Microseconds until the call returns on the host."""
    peak_mib: float | None = None


@dataclass
class Report:
    """Results of a run."""

    command: str
    date: str
    commit: str | None
    environment: dict[str, Any]
    cases: list[Case] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """Reason for each case or implementation that was not timed."""
    seconds: float = 0.0

    @classmethod
    def begin(cls, command: str, cases: Iterable[Case]) -> "Report":
        """A report without results, with the environment and the date."""
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        environment = {**info(), "cudnn": cudnn}
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return cls(command, now, commit(), environment, list(cases))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without empty fields of rows."""
        data = asdict(self)
        for part in ("rows", "checks"):
            data[part] = [
                {name: value for name, value in row.items() if value is not None}
                for row in data[part]
            ]
        for check in data["checks"]:
            # JSON has no NaN.
            check["errors"] = {
                name: value if math.isfinite(value) else str(value)
                for name, value in check["errors"].items()
            }
        return data

    @classmethod
    def load(cls, path: Path) -> "Report":
        """Load a report that was saved as JSON."""
        text = read_text(path, JSON_LIMIT)
        try:
            return build(cls, parse_json(text, path))
        except UserError as error:
            raise UserError(f"{path} is not a report of `reluformer bench`: {error}") from None

    def find(self, case: str, name: str, mode: str) -> Row | None:
        """The row of an implementation, or None."""
        wanted = (case, name, mode)
        return next((r for r in self.rows if (r.case, r.name, r.mode) == wanted), None)


def table(report: Report) -> str:
    """Markdown: a table for each case, then the implementations that were not timed."""
    lines = _environment(report)
    for case in report.cases:
        checks = [check for check in report.checks if check.case == case.name]
        timed = any(row.case == case.name for row in report.rows)
        if timed or any(check.refused for check in checks):
            lines += ["", f"{case.name}: {_legend(case)}", "", *_case_table(report, case, checks)]
    lines += _reasons(report)
    return "\n".join(lines)


def _environment(report: Report) -> list[str]:
    environment = report.environment
    packages = environment.get("packages", {})
    versions = ", ".join(
        f"{name} {packages[name]}" for name in ("torch", "triton") if packages.get(name)
    )
    devices = ", ".join(environment.get("devices", []))
    lines = [
        f"{report.command} on {report.date}, commit {report.commit or 'unknown'}",
        f"{devices}; {versions}, cuDNN {environment.get('cudnn')}, "
        f"{environment.get('threads')} threads",
    ]
    if any(case.device == "cpu" for case in report.cases):
        # Reports without the field were made before compiled kernels existed.
        lines.append(f"kernels of impl=cpu: {environment.get('cpu kernels', 'torch')}")
    return lines


def _legend(case: Case) -> str:
    if case.group == "features":
        return "time relative to the plain call"
    if case.group == "decode":
        return "microseconds, speed relative to the best softmax, GB/s of keys and values"
    return f"{_unit(case)[0]}, speed relative to the best softmax, share of the matmul"


def _unit(case: Case) -> tuple[str, float]:
    """Unit of the rate and its value for 1 TFLOP/s."""
    return ("TFLOP/s", 1.0) if case.device == "cuda" else ("GFLOP/s", 1e3)


def _case_table(report: Report, case: Case, checks: list[Check]) -> list[str]:
    # Peak memory of the last pass, which is a whole training step for dense cases.
    heaviest = case.modes[-1]
    rows = [["", *case.modes, "peak MiB", "error"]]
    for check in checks:
        if check.refused is not None:
            empty = [""] * len(case.modes)
            rows.append([check.name, f"refused: {check.refused}", *empty, ""])
        elif check.passed:
            timed = [report.find(case.name, check.name, mode) for mode in case.modes]
            last = report.find(case.name, check.name, heaviest)
            peak = "" if last is None or last.peak_mib is None else f"{last.peak_mib:,.1f}"
            cells = ["" if row is None else _cell(case, row) for row in timed]
            rows.append([check.name, *cells, peak, f"{check.errors['out']:.1e}"])
    products = [report.find(case.name, MATMUL, mode) for mode in case.modes]
    if case.group == "dense" and any(products):
        cells = ["" if row is None else _rate(case, row) for row in products]
        rows.append([MATMUL, *cells, "", ""])
    return _markdown(rows)


def _cell(case: Case, row: Row) -> str:
    if row.relative is not None:
        return f"{row.relative:.2f}"
    ratio = "" if row.x_softmax is None else f", {row.x_softmax:.2f}x"
    if row.gbytes is not None:
        return f"{row.ms * 1e3:.1f}{ratio}, {row.gbytes:,.1f}"
    share = "" if row.of_matmul is None else f", {row.of_matmul:.0%}"
    return f"{_rate(case, row)}{ratio}{share}"


def _rate(case: Case, row: Row) -> str:
    return "" if row.tflops is None else f"{row.tflops * _unit(case)[1]:.1f}"


def _markdown(rows: list[list[str]]) -> list[str]:
    """Lines of a table. Columns are as wide as their cells, except that refusals may be longer."""
    refused = "refused: "
    widths = [
        max(len(row[column]) for row in rows if not row[column].startswith(refused))
        for column in range(len(rows[0]))
    ]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def _reasons(report: Report) -> list[str]:
    """Implementations that could not run, by reason, and cases that were skipped."""
    absent: dict[tuple[str, str], int] = {}
    for check in report.checks:
        if check.absent is not None:
            key = (check.name, check.absent)
            absent[key] = absent.get(key, 0) + 1
    lines = [
        f"- {name}: {reason} ({count} of {len(report.cases)} cases)"
        for (name, reason), count in absent.items()
    ]
    lines += [f"- {name}: {reason}" for name, reason in report.skipped.items()]
    return ["", "Not timed:", "", *lines] if lines else []
