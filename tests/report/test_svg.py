"""Plots as SVG."""

import math
from xml.etree import ElementTree

import pytest

from reluformer.report.svg import plot_svg
from reluformer.study.findings import Plot, Series


@pytest.mark.parametrize("log", [False, True])
def test_plots_are_well_formed_and_inside_their_frame(log: bool) -> None:
    series = [
        Series("a < b", [8.0, 64.0, 512.0], [0.5, 2.0, math.nan], [0.1, 0.0, 0.0]),
        Series("one point", [64.0], [3.0]),
    ]
    text = plot_svg(Plot("x & y", "n", "v", series, log_x=log, log_y=log))
    tree = ElementTree.fromstring(text)
    circles = tree.findall(".//circle")
    assert len(circles) == 3
    assert all(0 <= float(c.get("cx", "-1")) <= 520 for c in circles)
    assert all(0 <= float(c.get("cy", "-1")) <= 320 for c in circles)
    assert len(tree.findall(".//path")) == 1
    assert "± 0.1" in text


@pytest.mark.parametrize(
    ("xs", "ticks"),
    [
        ([32.0, 512.0, 4096.0], ["32", "512", "4096"]),
        ([2.0**n for n in range(3, 14)], ["10", "100", "1000", "10000"]),
        ([16.0 * n for n in range(1, 8)], ["20", "50", "100"]),
        ([2000.0 * n for n in range(1, 8)], ["2000", "5000", "10000"]),
    ],
)
def test_a_logarithmic_axis_has_readable_ticks(xs: list[float], ticks: list[str]) -> None:
    plot = Plot("t", "x", "y", [Series("a", xs, [1.0] * len(xs))], log_x=True)
    texts = ElementTree.fromstring(plot_svg(plot)).findall(".//text")
    assert [text.text for text in texts if text.get("y") == "292.0"] == ticks


def test_a_plot_without_points_says_so() -> None:
    assert "nothing measured yet" in plot_svg(Plot("t", "x", "y", []))
    flat = plot_svg(Plot("t", "x", "y", [Series("a", [1.0], [0.0])]))
    assert flat.count("<circle") == 1
