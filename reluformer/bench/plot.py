"""Figure of a run: rates of the dense cases over their length."""

import importlib.util
from pathlib import Path
from typing import Any

from reluformer.bench.cases import Case, Mode
from reluformer.bench.report import MATMUL, Report, Row
from reluformer.bench.rules import DEFAULT, OTHERS
from reluformer.errors import UserError
from reluformer.files import atomic_path

FORMATS = (".svg", ".png", ".pdf")
_MODES: dict[Mode, str] = {"forward": "forward", "both": "forward and backward"}

# ReLU kernels stand out, softmax kernels are distinguishable, eager attention is dotted.
_STYLES: dict[str, dict[str, Any]] = {
    "relu triton": {"color": "#c1121f", "linewidth": 2.4, "marker": "o"},
    "relu cpu": {"color": "#c1121f", "linewidth": 2.4, "marker": "o"},
    DEFAULT: {"color": "#f77f00", "linewidth": 2.4, "marker": "o"},
    "SDPA-cuDNN": {"color": "#1d4e89", "marker": "s"},
    "SDPA-flash": {"color": "#3a86c8", "marker": "^"},
    "softmax sdpa": {"color": "#8ab6d6", "marker": "v"},
    "FlexAttention": {"color": "#7b5ea7", "marker": "D"},
    "FlexAttention, log of ReLU": {"color": "#b08fd8", "marker": "d"},
    "relu reference": {"color": "#d98880", "marker": ".", "linestyle": ":"},
    "softmax reference": {"color": "#777777", "marker": ".", "linestyle": ":"},
    "sparsemax reference": {"color": "#5b8c5a", "marker": "x", "linestyle": ":"},
    "entmax15 reference": {"color": "#a3b18a", "marker": "+", "linestyle": ":"},
    MATMUL: {"color": "#222222", "linewidth": 1.0, "linestyle": "--", "marker": "_"},
}
_OTHER = {"color": "#e09f3e", "marker": "o"}

Panel = tuple[str, int, bool]


def check_plot(path: Path) -> None:
    """Raise UserError before the measurement if the figure could not be written after it."""
    if path.suffix not in FORMATS:
        raise UserError(f"plot must end in {', '.join(FORMATS)}, got {path}")
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            "plot needs the package matplotlib, which is not installed: "
            "pip install 'reluformer[plots]'"
        )


def plot(report: Report, path: Path) -> None:
    """Draw the dense cases, with a column for each dtype, width and mask, and a row for each pass.

    Raises:
        UserError: If `path` has an unknown suffix, matplotlib is missing, or no case was timed.
    """
    check_plot(path)
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    panels = panels_of(report)
    if not panels:
        raise UserError(f"plot is {path}, but the report has no timed dense case to draw")
    size = (2.6 * len(panels) + 0.6, 5.4)
    # The same report must give the same bytes.
    settings = {"font.size": 9, "svg.hashsalt": "reluformer", "svg.fonttype": "none"}
    with pyplot.rc_context(settings):
        figure, axes = pyplot.subplots(
            len(_MODES), len(panels), figsize=size, sharex="col", sharey=True, squeeze=False
        )
        for column, (panel, cases) in enumerate(panels.items()):
            for axis, mode in zip(axes[:, column], _MODES, strict=True):
                _draw(axis, report, cases, mode)
            axes[0, column].set_title(_label(panel), fontsize=9)
            axes[-1, column].set_xlabel("length n")
        cuda = next(iter(panels.values()))[0].device == "cuda"
        for axis, title in zip(axes[:, 0], _MODES.values(), strict=True):
            axis.set_ylabel(f"{title}, {'TFLOP/s' if cuda else 'GFLOP/s'}")
        devices = report.environment.get("devices", [""])
        figure.suptitle(devices[-1 if cuda else 0], fontsize=10)
        _legend(figure, axes, report)
        metadata = {"Date": None} if path.suffix == ".svg" else None
        with atomic_path(path) as partial:
            figure.savefig(partial, format=path.suffix[1:], metadata=metadata, dpi=150)
        pyplot.close(figure)


def panels_of(report: Report) -> dict[Panel, list[Case]]:
    """Dense cases that have rows, by (dtype, width, causal), shortest first."""
    timed = {row.case for row in report.rows}
    panels: dict[Panel, list[Case]] = {}
    for case in sorted(report.cases, key=lambda case: case.keys):
        if case.group == "dense" and case.name in timed:
            panels.setdefault((case.dtype, case.width, case.causal), []).append(case)
    return dict(sorted(panels.items()))


def _draw(axis: Any, report: Report, cases: list[Case], mode: Mode) -> None:
    lines: dict[str, list[tuple[int, float]]] = {}
    for case in cases:
        for row in report.rows:
            # One row-normalised power is enough in a figure with many lines.
            if row.case == case.name and row.mode == mode and row.name not in OTHERS:
                lines.setdefault(row.name, []).append((case.keys, _rate(case, row)))
    for name, points in lines.items():
        style = {"linewidth": 1.4, "markersize": 5, **_STYLES.get(name, _OTHER)}
        axis.plot(*zip(*points, strict=True), label=name, **style)
    lengths = [case.keys for case in cases]
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def _legend(figure: Any, axes: Any, report: Report) -> None:
    """One legend below all panels, with the implementations that the check refused."""
    entries: dict[str, Any] = {}
    for axis in axes.flat:
        handles, names = axis.get_legend_handles_labels()
        entries |= dict(zip(names, handles, strict=True))
    known = list(_STYLES)
    order = sorted(entries, key=lambda name: known.index(name) if name in known else len(known))
    refused = sorted({check.name for check in report.checks if check.refused is not None})
    title = f"refused for their error: {', '.join(refused)}" if refused else None
    columns = min(len(order), max(2, 3 * axes.shape[1] // 2))
    lines = -(-len(order) // columns) + (title is not None)
    figure.tight_layout(rect=(0, 0.02 + 0.03 * lines, 1, 1))
    figure.legend(
        [entries[name] for name in order],
        order,
        loc="lower center",
        ncols=columns,
        frameon=False,
        title=title,
        title_fontsize=8,
    )


def _rate(case: Case, row: Row) -> float:
    assert row.tflops is not None
    return row.tflops * (1.0 if case.device == "cuda" else 1e3)


def _label(panel: Panel) -> str:
    dtype, width, causal = panel
    return f"{dtype}, d {width}, {'causal' if causal else 'full'}"
