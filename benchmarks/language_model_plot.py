"""Draw the loss curves of `benchmarks.language_model train`.

    python -m benchmarks.language_model_plot softmax.json relu.json --out docs/language-model.svg

Lines are the training loss, and circles the loss on the dev text. The left panel has the losses of
all models, and the right panel their differences from the first model. A file may hold several
results of `train` in a list `runs`.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.curves import COLOURS
from reluformer.console import guarded
from reluformer.files import atomic_path

LABELS = {"sdpa": "softmax (sdpa)"}

Points = dict[float, float]
"""Losses by the number of tokens in millions."""


def points(result: dict[str, Any], series: str, name: str) -> Points:
    """The losses `name` of the list `series` of a results file."""
    tokens = result["size"]["batch"] * result["size"]["length"] / 1e6
    return {tokens * point["step"]: point[name] for point in result[series]}


def difference(losses: Points, baseline: Points) -> Points:
    """Losses minus those of the baseline, where both are known."""
    return {x: loss - baseline[x] for x, loss in losses.items() if x in baseline}


def draw(results: Sequence[dict[str, Any]], out: Path) -> None:
    """Write one figure with the curves of several runs; the first is the baseline."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # The same curves must give the same bytes.
    settings = {"font.size": 9, "svg.hashsalt": "reluformer", "svg.fonttype": "none"}
    with rc_context(settings):
        figure = Figure(figsize=(8.4, 3.6), layout="constrained")
        losses, gaps = figure.subplots(1, 2, width_ratios=(3, 2))
        curves = [points(result, "curve", "loss") for result in results]
        devs = [points(result, "dev", "dev_loss") for result in results]
        for result, colour, curve, dev in zip(results, COLOURS, curves, devs, strict=False):
            label = _label(result)
            final = result["dev"][-1]["dev_loss"]
            losses.plot(*_xy(curve), color=colour, label=f"{label}: dev {final:.3f}")
            losses.plot(*_xy(dev), "o", color=colour, markersize=4)
            if result is not results[0]:
                gaps.plot(*_xy(difference(curve, curves[0])), color=colour)
                gaps.plot(*_xy(difference(dev, devs[0])), "o", color=colour, markersize=4)
        lowest = min(min(curve.values()) for curve in curves)
        losses.set_ylim(lowest - 0.1, lowest + 2.0)
        losses.set_title("loss, nats per token")
        gaps.set_title(f"difference from {_label(results[0])}, nats")
        gaps.axhline(0, color=COLOURS[0])
        gaps.plot([], [], color="#999999", label="training text")
        gaps.plot([], [], "o", color="#999999", markersize=4, label="dev text")
        _mark_repetitions(losses, results[0])
        for axis in (losses, gaps):
            axis.set_xlabel("million tokens")
            axis.grid(alpha=0.25)
            axis.legend(loc="upper right", edgecolor="none", framealpha=1)
        with atomic_path(out) as partial:
            figure.savefig(partial, format=out.suffix[1:], metadata={"Date": None})


def _label(result: dict[str, Any]) -> str:
    """Name of the attention and the options that were set."""
    options = [f"{name} {value}" for name, value in result.get("options", {}).items()]
    return ", ".join([LABELS.get(result["attention"], result["attention"]), *options])


def _xy(losses: Points) -> tuple[list[float], list[float]]:
    return list(losses), list(losses.values())


def _mark_repetitions(axis: Any, result: dict[str, Any]) -> None:
    """Mark where the training text starts again; the training loss falls there."""
    text, total = result["text_tokens"] / 1e6, result["tokens"] / 1e6
    for number in range(1, int(total / text) + 1):
        axis.axvline(number * text, color="#999999", linestyle=":", linewidth=1)
        axis.annotate(
            "text repeats",
            (number * text, 0.5),
            xycoords=axis.get_xaxis_transform(),
            xytext=(-2, 0),
            textcoords="offset points",
            rotation=90,
            ha="right",
            va="bottom",
            color="#666666",
            fontsize=7,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the files and write the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    files = [json.loads(path.read_text()) for path in options.results]
    draw([result for file in files for result in file.get("runs", [file])], options.out)


if __name__ == "__main__":
    guarded(main)()
