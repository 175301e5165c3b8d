"""A report as one HTML page that needs no network."""

from html import escape
from importlib import resources

from reluformer import __version__
from reluformer.inspection import maps
from reluformer.report.gather import Contents, RunSection, StudySection, damage_named
from reluformer.report.provenance import cell_rows, facts, signatures
from reluformer.report.svg import plot_svg
from reluformer.study.findings import State, Table, Verdict
from reluformer.study.record import device_minutes

_CLASSES: dict[State, str] = {
    "holds": "holds",
    "holds partly": "partly",
    "does not hold here": "fails",
    "not measured": "unknown",
}
# Most characters of a value that is not broken.
_ONE_LINE = 20


def html_report(contents: Contents) -> str:
    """The whole page."""
    css = resources.files("reluformer.report").joinpath("assets", "report.css").read_text("utf-8")
    has_maps = any(section.maps for section in contents.studies)
    style = css + (maps.style() if has_maps else "")
    script = f"<script>\n{maps.script()}</script>" if has_maps else ""
    sections = [_summary(contents)] if contents.studies else []
    for section in contents.studies:
        with damage_named(section.path):
            sections.append(_study(section))
    for run in contents.runs:
        with damage_named(run.folder):
            sections.append(_run(run))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<title>ReLU and softmax in Transformers: study report</title>\n"
        f"<style>\n{style}</style></head>\n<body><main>\n"
        "<h1>ReLU and softmax in Transformers: what holds</h1>\n"
        '<p class="soft">Claims of Shen et al. 2023 (arXiv 2302.06461), measured with reluformer '
        f"{__version__}. Numbers are means over seeds ± standard deviation; differences are paired "
        "bootstraps over the test segments with 95 % intervals, the seeds of a group pooled.</p>\n"
        + "\n".join(sections)
        + f"\n</main>{script}</body></html>\n"
    )


def _summary(contents: Contents) -> str:
    rows = []
    for section in contents.studies:
        for verdict in section.findings.verdicts:
            rows.append(
                f'<tr><td><a href="#{_anchor(section)}">{escape(section.name)}</a></td>'
                f"<td>{escape(verdict.claim)}</td>"
                f'<td class="{_CLASSES[verdict.state]}">{verdict.state}</td>'
                f"<td>{escape(verdict.number)}</td></tr>"
            )
    cells = contents.cells.values()
    notice = f'<p class="notice">{contents.notice}</p>' if contents.notice else ""
    return (
        f"{notice}<h2>All claims</h2>"
        '<div class="scroll"><table class="text summary"><thead><tr><th>study</th><th>claim</th>'
        f"<th>verdict</th><th>the number that decides</th></tr></thead><tbody>{''.join(rows)}"
        f'</tbody></table></div><p class="soft">{len(cells)} cells, {device_minutes(cells)}; '
        f"cells that several studies share count once. {contents.unmeasured}</p>"
    )


def _study(section: StudySection) -> str:
    study = section.study
    question = "" if study is None else study.question
    parts = [
        f'<section><h2 id="{_anchor(section)}">{escape(section.name)}</h2>',
        f"<p>{escape(question)}</p>",
    ]
    if study is not None:
        parts.append(f'<p class="soft">The paper: {escape(study.paper)} {escape(study.notes)}</p>')
    parts += [_verdict(verdict) for verdict in section.findings.verdicts]
    parts += [f'<p class="notice">{escape(section.progress)}</p>'] * bool(section.progress)
    parts += [f"<p>{escape(remark)}</p>" for remark in section.remarks]
    parts += [_table(table) for table in section.findings.tables]
    if section.findings.plots:
        plots = "".join(plot_svg(plot) for plot in section.findings.plots)
        parts.append(f'<div class="plots">{plots}</div>')
    if section.maps:
        parts.append(f"<h3>Attention maps</h3>{maps.map_view(section.maps)}")
    parts.append(_provenance(section))
    return "\n".join([*parts, "</section>"])


def _verdict(verdict: Verdict) -> str:
    return (
        f'<div class="verdict {_CLASSES[verdict.state]}"><p><span class="state">{verdict.state}'
        f"</span>: {escape(verdict.claim)}</p><p><b>{escape(verdict.number)}</b> "
        f'<span class="soft">({escape(verdict.rule)})</span></p></div>'
    )


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    rows = "".join(
        "<tr>" + "".join(f"<td>{_cell(value)}</td>" for value in row) + "</tr>"
        for row in table.rows
    )
    text = ' class="text"' if len(table.columns) == 2 else ""
    return (
        f'<h3>{escape(table.title)}</h3><div class="scroll" tabindex="0"><table{text}><thead><tr>'
        f"{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _cell(value: str) -> str:
    """Text of a cell; a short value stays on one line, also in print."""
    text = escape(value)
    return text if len(value) > _ONE_LINE else text.replace(" ", "&nbsp;")


def _provenance(section: StudySection) -> str:
    """Signatures, commands, hardware, and one row a cell."""
    record = section.record
    lines = "".join(
        f"<li>{escape(name)}: <code>{escape(value)}</code></li>" for name, value in facts(section)
    )
    signed = "".join(
        f"<li>{escape(name)}: <code>{escape(text)}</code></li>" for name, text in signatures(record)
    )
    columns, rows = cell_rows(record)
    cells = _table(Table(f"Cells in {record.folder}", columns, rows))
    failed = "".join(f"<li>{escape(n)}: {escape(r)}</li>" for n, r in record.failed.items())
    failures = f"<p>Failed in the last call:</p><ul>{failed}</ul>" if failed else ""
    return (
        "<details><summary>Commands, hardware, signatures and cells</summary>"
        f"<ul>{lines}{signed}</ul>{failures}{cells}</details>"
    )


def _run(run: RunSection) -> str:
    rows = [[name, value] for name, value in run.facts]
    plots = "".join(plot_svg(plot) for plot in run.plots)
    return (
        f"<section><h2>Run {escape(run.folder.name)}</h2>"
        f'{_table(Table("Facts", ["", ""], rows))}<div class="plots">{plots}</div></section>'
    )


def _anchor(section: StudySection) -> str:
    return f"{section.record.study}-{section.record.budget}"
