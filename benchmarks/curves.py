"""Draw training curves from the JSON files of studies.

    python -m benchmarks.curves results/2026-11-15-two-by-two.json --out docs/collapse.svg \\
        --panel nll --panel cross.entropy --panel cross.zeros \\
        --run softmax "softmax" --run root-above-losses "the paper's start, with losses"

A panel is `nll` (training loss), `dev`, or a statistic of an attention site: `cross.entropy`,
`cross.zeros`, `decoder.row_sum`, `cross.dead_rows`. Runs keep the order and names of the options.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from reluformer.console import guarded
from reluformer.errors import UserError
from reluformer.files import atomic_path

COLOURS = ("#444444", "#c1121f", "#1d4e89", "#e09f3e", "#5b8c5a", "#7b5ea7", "#b08968")
TITLES = {
    "nll": "training loss, nats per token",
    "dev": "dev loss, nats per token",
    "entropy": "entropy",
    "zeros": "share of zero weights",
    "row_sum": "mean row sum",
    "dead_rows": "share of rows without weight",
}
SITES = {"cross": "cross-attention", "decoder": "decoder", "encoder": "encoder"}


def points(curve: list[dict[str, Any]], panel: str) -> tuple[list[float], list[float]]:
    """Millions of target tokens and the value of the panel at each point of a curve."""
    xs, ys = [], []
    for point in curve:
        value = _value(point, panel)
        if value is not None:
            xs.append(point.get("tokens", 0) / 1e6)
            ys.append(value)
    return xs, ys


def _value(point: dict[str, Any], panel: str) -> float | None:
    value: float | None
    if panel == "dev":
        value = point.get("dev", {}).get("nll")
    elif panel == "nll":
        value = point.get("nll")
    else:
        site, _, name = panel.partition(".")
        value = point.get("attention", {}).get(site, {}).get(name)
    return value


def title(panel: str) -> str:
    """Title of a panel."""
    site, _, name = panel.rpartition(".")
    return f"{SITES[site]}: {TITLES[name]}" if site else TITLES[name]


def check(panels: list[str]) -> None:
    """Raise UserError for an unknown panel."""
    named = [f"{site}.{name}" for site in SITES for name in list(TITLES)[2:]]
    for panel in panels:
        if panel not in ("nll", "dev", *named):
            raise UserError(f"--panel must be one of nll, dev, {', '.join(named)}, got {panel!r}")


def draw(
    runs: dict[str, list[dict[str, Any]]], panels: list[str], logs: list[str], out: Path
) -> None:
    """Draw the panels side by side, with a line for each run."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    # The same curves must give the same bytes.
    settings = {"font.size": 9, "svg.hashsalt": "reluformer", "svg.fonttype": "none"}
    with pyplot.rc_context(settings):
        figure, axes = pyplot.subplots(1, len(panels), figsize=(3.3 * len(panels), 3.4))
        for axis, panel in zip([axes] if len(panels) == 1 else axes, panels, strict=True):
            for (name, curve), colour in zip(runs.items(), COLOURS, strict=False):
                axis.plot(*points(curve, panel), color=colour, label=name, linewidth=1.6)
            axis.set_title(title(panel), fontsize=9)
            axis.set_xlabel("million target tokens")
            axis.grid(alpha=0.25)
            if panel in logs:
                axis.set_yscale("log")
        handles, labels = axis.get_legend_handles_labels()
        columns = min(len(labels), 3)
        rows = -(-len(labels) // columns)
        figure.legend(handles, labels, loc="lower center", ncol=columns, frameon=False)
        figure.tight_layout(rect=(0, 0.055 * rows + 0.02, 1, 1))
        with atomic_path(out) as partial:
            figure.savefig(partial, format=out.suffix[1:], metadata={"Date": None})
        pyplot.close(figure)


def _runs(record: dict[str, Any]) -> dict[str, Any]:
    """Runs by name, from the record of a study or from an older file with `runs`."""
    if "outcomes" in record:
        return {outcome["name"]: outcome["detail"] for outcome in record["outcomes"]}
    runs: dict[str, Any] = record["runs"]
    return runs


@guarded
def main() -> None:
    """Read the results, check the arguments and draw."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("results", type=Path, nargs="+", help="JSON files of studies")
    parser.add_argument("--panel", action="append", required=True)
    parser.add_argument("--log", action="append", default=[], help="panel with a log axis")
    parser.add_argument("--run", nargs=2, action="append", metavar=("RUN", "NAME"), required=True)
    parser.add_argument("--out", type=Path, required=True, help="an .svg file")
    arguments = parser.parse_args()
    check([*arguments.panel, *arguments.log])
    if len(arguments.run) > len(COLOURS):
        raise UserError(f"--run may be given {len(COLOURS)} times, got {len(arguments.run)}")
    results: dict[str, Any] = {}
    for path in arguments.results:
        results |= _runs(json.loads(path.read_text(encoding="utf-8")))
    for run, _ in arguments.run:
        if run not in results:
            raise UserError(f"--run must be one of {', '.join(results)}, got {run!r}")
    runs = {name: results[run]["curve"] for run, name in arguments.run}
    draw(runs, arguments.panel, arguments.log, arguments.out)


if __name__ == "__main__":
    main()
