"""Plots of one run's logged numbers."""

from collections.abc import Sequence
from typing import Any

from reluformer.study.findings import Plot, Series


def run_plots(curve: Sequence[dict[str, Any]]) -> list[Plot]:
    """Losses, and entropy and zeros of every attention site, over training."""
    steps = [point for point in curve if "nll" in point]
    if not steps:
        return []
    xs = [point["tokens"] / 1e6 for point in steps]
    losses = [Series("training", xs, [point["nll"] for point in steps])]
    dev = [point for point in steps if "nll" in point.get("dev", {})]
    if dev:
        losses.append(
            Series("dev", [p["tokens"] / 1e6 for p in dev], [p["dev"]["nll"] for p in dev])
        )
    axis = "million target tokens"
    plots = [Plot("Loss", axis, "nats a token", losses)]
    for name, label in (("entropy", "entropy in nats"), ("zeros", "share of zero weights")):
        series = [
            Series(site, xs, [point["attention"][site][name] for point in steps])
            for site in steps[0].get("attention", {})
        ]
        plots.append(Plot(f"Attention: {name}", axis, label, series))
    return plots
