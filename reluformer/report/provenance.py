"""Where the numbers of a report come from: commands, versions, signatures, run folders."""

from reluformer.report.gather import StudySection
from reluformer.study.record import StudyRecord, device_minutes


def facts(section: StudySection) -> list[tuple[str, str]]:
    """Command, date, commit, versions, hardware and time."""
    record = section.record
    packages = record.machine.get("packages", {})
    versions = ", ".join(f"{name} {value}" for name, value in packages.items() if value)
    left = len(record.planned) - len(record.outcomes)
    return [
        ("command", record.command),
        ("record", str(section.path)),
        ("budget", record.budget),
        ("date", record.date),
        ("commit", record.commit or "unknown"),
        ("hardware", "; ".join(record.machine.get("devices", []))),
        ("versions", f"Python {record.machine.get('python', '?')}, {versions}"),
        ("time", device_minutes(record.outcomes)),
        (
            "cells",
            f"{len(record.outcomes)} of {len(record.planned)} ended"
            + f", {left} left" * (left > 0),
        ),
    ]


def signatures(record: StudyRecord) -> list[tuple[str, str]]:
    """sacreBLEU's signature of every score that the study reports, once each."""
    signed: dict[tuple[str, str], None] = {}
    for outcome in record.outcomes:
        for scores in outcome.detail.get("scores", {}).values():
            for name, score in scores.items():
                if isinstance(score, dict):
                    signed[name, score["signature"]] = None
    return list(signed)


def cell_rows(record: StudyRecord) -> tuple[list[str], list[list[str]]]:
    """One row a cell: status, training, tuning, time; then those that have not run.

    Names are folders.
    """
    columns = ["cell", "status", "M tokens", "penalty", "score factor", "device s", "commit"]
    rows = []
    for outcome in record.outcomes:
        tuned = outcome.detail.get("tuned", {})
        factor = outcome.values.get("score_factor")
        rows.append(
            [
                outcome.name,
                outcome.status if outcome.finished else f"diverged: {outcome.reason[:90]}",
                f"{outcome.values['tokens'] / 1e6:.2f}" if "tokens" in outcome.values else "",
                str(tuned.get("length_penalty", "")),
                "" if factor is None else f"{factor:.2f}",
                f"{outcome.device_seconds:.0f}",
                str(outcome.detail.get("commit") or "")[:8],
            ]
        )
    ended = {outcome.name for outcome in record.outcomes}
    blank = [""] * (len(columns) - 2)
    rows += [[name, "not run", *blank] for name in record.planned if name not in ended]
    return columns, rows
