"""Draw the speed of ReLU attention relative to cuDNN's softmax, from results of `kernel_choices`.

    python -m benchmarks.speed_curves results/2026-11-19-h200-forward-tiles.json \\
        results/2026-11-19-h200-stored-gradients.json \\
        results/2026-11-18-h200-kernel-choices.json --out docs/speed-h200.svg

Every point is the ratio of times within the same rounds, of full calls with the kernels that the
package chooses today. Where several files have a point, the first one counts. Forward and backward
may have been measured with another tile of the forward kernel only.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.kernel_choices import PASSES, RULES
from reluformer.console import guarded
from reluformer.errors import UserError
from reluformer.files import atomic_path
from reluformer.ops.backends.triton.hopper.launch_backward import lengths_to_store
from reluformer.ops.backends.triton.hopper.launch_forward import fastest_tile
from reluformer.ops.backends.triton.problem import Settings

STYLES = {
    "plain": ("ReLU", "#c1121f"),
    "1 + sum": ("ReLU / (1 + row sum)", "#e09f3e"),
    "power 2": ("ReLU² / row sum", "#1d4e89"),
    "power 4": ("ReLU⁴ / row sum (default)", "#5b8c5a"),
}
DEFAULT = "power 4"
TITLES = {"forward": "forward", "both": "forward and backward"}
WIDTHS = (64, 128)
TILES = ("two", "late", "three")
Row = dict[str, Any]


class Panel(NamedTuple):
    """Calls of one head width, forward or forward and backward."""

    width: int
    each: str
    """One of `PASSES`."""


def chosen(rule: str, panel: Panel, length: int) -> list[str]:
    """Names of choices that time today's kernels, best first."""
    options = RULES[rule]
    settings = Settings(
        1.0,
        length,
        length,
        power=options.get("power", 1),
        row_normalise=options.get("row_normalise", 0.0),
    )
    tile = fastest_tile(panel.width, settings)
    if panel.each == "forward":
        return [f"{tile}, recomputed"]
    is_stored = length in lengths_to_store(panel.width, settings)
    gradients = "stored" if is_stored else "recomputed"
    return [f"{name}, {gradients}" for name in (tile, *TILES)]


def speeds(rows: Sequence[Row], rule: str, panel: Panel) -> dict[int, float]:
    """Speed relative to softmax by length."""
    head = {"rule": rule, "width": panel.width, "pass": panel.each, "causal": False}
    found = [row for row in rows if head.items() <= row.items() and "x_softmax" in row]
    points: dict[int, float] = {}
    for length in sorted({row["length"] for row in found}):
        here = [row for row in found if row["length"] == length]
        for choice in chosen(rule, panel, length):
            ratios = [row["x_softmax"] for row in here if row["choice"] == choice]
            if ratios:
                points[length] = ratios[0]
                break
    return points


def draw(curves: Mapping[Panel, Mapping[str, dict[int, float]]], device: str, out: Path) -> None:
    """Draw a panel for each head width and pass."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    # The same curves must give the same bytes.
    settings = {"font.size": 10, "svg.hashsalt": "reluformer", "svg.fonttype": "none"}
    with pyplot.rc_context(settings):
        figure, axes = pyplot.subplots(1, len(curves), figsize=(11, 3.8), sharey=True)
        for axis, (panel, lines) in zip(axes, curves.items(), strict=True):
            axis.axhline(1.0, color="#444444", linewidth=1.2, linestyle="--")
            for rule, points in lines.items():
                name, colour = STYLES[rule]
                thick = 2.6 if rule == DEFAULT else 1.5
                axis.plot(
                    *zip(*points.items(), strict=True),
                    "o-", color=colour, label=name, linewidth=thick,
                )  # fmt: skip
            axis.set_xscale("log", base=2)
            ticks = sorted({length for points in lines.values() for length in points})
            axis.set_xticks(ticks, [f"{tick // 1024} k" for tick in ticks])
            axis.minorticks_off()
            axis.set_title(f"head width {panel.width}\n{TITLES[panel.each]}", fontsize=10)
            axis.set_xlabel("keys")
            axis.grid(alpha=0.25)
        axes[0].set_ylim(bottom=0)
        axes[0].set_ylabel("speed, cuDNN softmax = 1")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower center", ncol=len(labels), frameon=False)
        figure.suptitle(f"{device}: bfloat16, 16,384 tokens, width 2048, full", fontsize=10)
        figure.tight_layout(rect=(0, 0.07, 1, 1))
        with atomic_path(out) as partial:
            figure.savefig(partial, format=out.suffix[1:], metadata={"Date": None})
        pyplot.close(figure)


@guarded
def main(arguments: Sequence[str] | None = None) -> None:
    """Read the results and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+", help="files of benchmarks.kernel_choices")
    parser.add_argument("--out", type=Path, required=True, help="an .svg file")
    options = parser.parse_args(arguments)
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in options.results]
    rows = [row for report in reports for row in report["rows"]]
    panels = [Panel(width, each) for width, each in product(WIDTHS, PASSES)]
    curves = {panel: {rule: speeds(rows, rule, panel) for rule in STYLES} for panel in panels}
    for panel, lines in curves.items():
        for rule, points in lines.items():
            if not points:
                raise UserError(
                    f"the files have no {panel.each} pass of {rule} at width {panel.width}"
                )
            print(panel.width, panel.each, rule, {n: round(x, 2) for n, x in points.items()})
    (device,) = {report["machine"]["devices"][-1] for report in reports}
    draw(curves, device, options.out)


if __name__ == "__main__":
    main()
