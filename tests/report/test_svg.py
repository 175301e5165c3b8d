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


def test_a_plot_without_points_says_so() -> None:
    assert "nothing measured yet" in plot_svg(Plot("t", "x", "y", []))
    flat = plot_svg(Plot("t", "x", "y", [Series("a", [1.0], [0.0])]))
    assert flat.count("<circle") == 1
