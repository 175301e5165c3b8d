"""What a run found: rows, checks and circumstances, as JSON and as a Markdown table."""

import datetime
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from reluformer.bench.cases import Case, Mode
from reluformer.bench.gate import Check
from reluformer.errors import UserError
from reluformer.info import commit, info

MATMUL = "matmul"


@dataclass(frozen=True)
class Row:
    """One contestant, or the matrix product, in one pass of one case; only who passed the gate."""

    case: str
    mode: Mode
    name: str
    kind: str
    ms: float
    """Median over the rounds; `low` and `high` are the extremes."""
    low: float
    high: float
    pairs: int
    """Rounds, so pairs behind each ratio."""
    tflops: float | None = None
    x_softmax: float | None = None
    """How many times as fast as the best softmax kernel: the median of the ratios in a round."""
    of_matmul: float | None = None
    """TFLOP/s as a share of the matrix product's, likewise."""
    relative: float | None = None
    """Time as a multiple of the plain call's, likewise, for features; of ragged sequences, divided
    by their share of its work."""
    gbytes: float | None = None
    """Gigabytes of keys and values read a second, for decoding."""
    host_us: float | None = None
    peak_mib: float | None = None


@dataclass
class Report:
    """A whole run."""

    command: str
    date: str
    commit: str | None
    environment: dict[str, Any]
    cases: list[Case] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """Why a case was not timed, or not in full."""
    seconds: float = 0.0

    @classmethod
    def begin(cls, command: str, cases: Iterable[Case]) -> "Report":
        """A report without results, of this machine and moment."""
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        environment = {**info(), "cudnn": cudnn}
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return cls(command, now, commit(), environment, list(cases))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, rows without their empty fields."""
        found = asdict(self)
        for part in ("rows", "checks"):
            found[part] = [
                {name: value for name, value in each.items() if value is not None}
                for each in found[part]
            ]
        for check in found["checks"]:
            # JSON has no NaN.
            check["errors"] = {
                name: value if math.isfinite(value) else str(value)
                for name, value in check["errors"].items()
            }
        return found

    @classmethod
    def load(cls, path: Path) -> "Report":
        """Read what `to_dict` gave."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            parts = {"cases": Case, "checks": Check, "rows": Row}
            for name, kind in parts.items():
                found[name] = [kind(**each) for each in found[name]]
            report = cls(**found)
            for check in report.checks:
                check.errors.update({name: float(each) for name, each in check.errors.items()})
            return report
        except (AttributeError, KeyError, TypeError, ValueError) as problem:
            raise UserError(f"{path} is no report of `reluformer bench`: {problem}") from None

    def find(self, case: str, name: str, mode: str) -> Row | None:
        """The row of a contestant, or None."""
        wanted = (case, name, mode)
        return next((r for r in self.rows if (r.case, r.name, r.mode) == wanted), None)


def table(report: Report) -> str:
    """Everything for people, in Markdown: a table for each case, then who was not timed and why."""
    lines = _circumstances(report)
    for case in report.cases:
        checks = [each for each in report.checks if each.case == case.name]
        timed = any(row.case == case.name for row in report.rows)
        if timed or any(check.refused for check in checks):
            lines += ["", f"{case.name}: {_legend(case)}", "", *_case_table(report, case, checks)]
    lines += _reasons(report)
    return "\n".join(lines)


def _circumstances(report: Report) -> list[str]:
    found = report.environment
    packages = found.get("packages", {})
    versions = ", ".join(
        f"{name} {packages[name]}" for name in ("torch", "triton") if packages.get(name)
    )
    place = ", ".join(found.get("devices", []))
    lines = [
        f"{report.command} on {report.date}, commit {report.commit or 'unknown'}",
        f"{place}; {versions}, cuDNN {found.get('cudnn')}, {found.get('threads')} threads",
    ]
    if any(case.device == "cpu" for case in report.cases):
        # Older reports were of the only ones there were.
        lines.append(f"kernels of impl=cpu: {found.get('cpu kernels', 'torch')}")
    return lines


def _legend(case: Case) -> str:
    if case.group == "features":
        return "time relative to the plain call"
    if case.group == "decode":
        return "microseconds, speed relative to the best softmax, GB/s of keys and values"
    return f"{_unit(case)[0]}, speed relative to the best softmax, share of the matmul"


def _unit(case: Case) -> tuple[str, float]:
    """Name of the rate, and what a TFLOP/s is in it."""
    return ("TFLOP/s", 1.0) if case.device == "cuda" else ("GFLOP/s", 1e3)


def _case_table(report: Report, case: Case, checks: list[Check]) -> list[str]:
    # Memory is that of a whole step where there is one.
    heaviest = case.modes[-1]
    rows = [["", *case.modes, "peak MiB", "error"]]
    for check in checks:
        if check.refused is not None:
            empty = [""] * len(case.modes)
            rows.append([check.name, f"refused: {check.refused}", *empty, ""])
        elif check.passed:
            found = [report.find(case.name, check.name, mode) for mode in case.modes]
            last = report.find(case.name, check.name, heaviest)
            peak = "" if last is None or last.peak_mib is None else f"{last.peak_mib:,.1f}"
            cells = ["" if row is None else _cell(case, row) for row in found]
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
    """Lines of a table; a refusal, in the second column, is wider than its numbers may be."""
    refused = "refused: "
    widths = [
        max(len(row[at]) for row in rows if not row[at].startswith(refused))
        for at in range(len(rows[0]))
    ]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def _reasons(report: Report) -> list[str]:
    """Absent contestants by reason, and cases that were cut short."""
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
