"""A study's record on a terminal."""

from reluformer.console import print_table
from reluformer.study.definition import Results, Study
from reluformer.study.record import StudyRecord


def print_record(study: Study, record: StudyRecord) -> None:
    """Print tables, verdicts, and what is left."""
    findings = study.conclude(Results(record.outcomes, record.comparisons))
    for table in findings.tables:
        print_table(table.title, table.columns, table.rows)
    for outcome in record.outcomes:
        if not outcome.finished:
            print(f"{outcome.name} diverged: {outcome.reason}")
    for verdict in findings.verdicts:
        print(f"{verdict.state}: {verdict.claim}")
        print(f"    {verdict.number} ({verdict.rule})")
    if record.budget == "tiny" and findings.verdicts:
        print("The tiny budget shows that the software works; its verdicts decide nothing.")
    left = len(record.planned) - len(record.outcomes)
    for name, reason in record.failed.items():
        print(f"{name} failed: {reason}")
    if left:
        print(f"{left} of {len(record.planned)} cells are left; repeat the command to go on")
