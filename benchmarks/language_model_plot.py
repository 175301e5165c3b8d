"""Draw the loss curves of `benchmarks.language_model train`.

    python -m benchmarks.language_model_plot softmax.json relu.json --out docs/language-model.svg

Lines are the training loss, and circles the loss on the dev text.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reluformer.console import guarded
from reluformer.files import atomic_path

COLOURS = ("#444444", "#c1121f", "#1d4e89", "#e09f3e")
LABELS = {"sdpa": "softmax (sdpa)", "normalised_relu": "normalised_relu"}


def draw(results: Sequence[dict[str, Any]], out: Path) -> None:
    """Write one figure with the curves of several runs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    for colour, result in zip(COLOURS, results, strict=False):
        size = result["size"]
        tokens = size["batch"] * size["length"] / 1e6
        label = LABELS.get(result["attention"], result["attention"])
        final = result["dev"][-1]["dev_loss"]
        axis.plot(
            [tokens * point["step"] for point in result["curve"]],
            [point["loss"] for point in result["curve"]],
            color=colour,
            linewidth=1,
            label=f"{label}: dev {final:.3f}",
        )
        axis.plot(
            [tokens * point["step"] for point in result["dev"]],
            [point["dev_loss"] for point in result["dev"]],
            "o",
            color=colour,
            markersize=4,
        )
    lowest = min(point["loss"] for result in results for point in result["curve"])
    axis.set_ylim(lowest - 0.2, lowest + 2.5)
    axis.set_xlabel("million tokens")
    axis.set_ylabel("loss, nats per token")
    axis.grid(alpha=0.3)
    axis.legend()
    with atomic_path(out) as partial:
        figure.savefig(partial, format=out.suffix[1:], metadata={"Date": None})


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the files and write the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    draw([json.loads(path.read_text()) for path in options.results], options.out)


if __name__ == "__main__":
    guarded(main)()
