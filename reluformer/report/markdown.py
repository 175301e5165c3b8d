"""A report as Markdown: the same verdicts and tables, without plots and maps."""

from collections.abc import Sequence

from reluformer.report.gather import Contents, RunSection, StudySection, damage_named
from reluformer.report.provenance import cell_rows, facts, signatures
from reluformer.study.findings import Table


def markdown_report(contents: Contents) -> str:
    """The whole text."""
    parts = ["# ReLU and softmax in Transformers: what holds", ""]
    parts += [contents.notice, ""] if contents.notice else []
    verdicts = [
        [section.name, verdict.claim, verdict.state, verdict.number]
        for section in contents.studies
        for verdict in section.findings.verdicts
    ]
    if verdicts:
        columns = ["study", "claim", "verdict", "the number that decides"]
        parts.append(_table(Table("All claims", columns, verdicts)))
        parts += [contents.unmeasured, ""] if contents.unmeasured else []
    for section in contents.studies:
        with damage_named(section.path):
            parts.append(_study(section))
    parts += [_run(run) for run in contents.runs]
    return "\n".join(parts).rstrip() + "\n"


def _study(section: StudySection) -> str:
    record, study = section.record, section.study
    parts = [f"## {section.name}", ""]
    if study is not None:
        parts += [study.question, "", f"The paper: {study.paper} {study.notes}".strip(), ""]
    for verdict in section.findings.verdicts:
        parts += [
            f"- **{verdict.state}**: {verdict.claim}. {verdict.number} ({verdict.rule})",
        ]
    parts += ["", f"{section.progress}\n"] if section.progress else []
    parts += ["", *(f"{remark}\n" for remark in section.remarks)]
    parts += [*(_table(table) for table in section.findings.tables)]
    described = [*facts(section), *signatures(record)]
    parts += [f"- {name}: `{value}`" for name, value in described]
    parts += [f"- failed in the last call: {n}: {why}" for n, why in record.failed.items()]
    columns, rows = cell_rows(record)
    parts += ["", _table(Table("Cells", columns, rows))]
    return "\n".join(parts)


def _run(run: RunSection) -> str:
    rows = [[name, value] for name, value in run.facts]
    return f"## Run {run.folder.name}\n\n" + _table(Table("Facts", ["", ""], rows))


def _table(table: Table) -> str:
    columns = list(zip(*table.rows, strict=False)) or [()] * len(table.columns)
    lines = [
        f"### {table.title}",
        "",
        _row(table.columns),
        _row(["---:" if _is_numeric(column) else "---" for column in columns]),
        *(_row(row) for row in table.rows),
        "",
    ]
    return "\n".join(lines)


def _is_numeric(column: Sequence[str]) -> bool:
    """Whether all values of a column begin with a number, as far as there are any."""
    return all(value[:1] in "+-–0123456789" for value in column)


def _row(values: list[str]) -> str:
    cells = (value.replace("|", "\\|").replace("\n", " ") for value in values)
    return f"| {' | '.join(cells)} |"
