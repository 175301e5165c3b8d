"""Plots with error bars as inline SVG; colours come from the page's style sheet."""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from reluformer.study.findings import Plot, Series

_WIDTH, _HEIGHT = 520, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 12, 44
_COLOURS = 8
# Most values of a logarithmic axis that are all its ticks.
_MOST_MARKS = 6
_DASHES = ("", "6 3", "2 3", "8 3 2 3")


class _Axis(NamedTuple):
    """A linear or logarithmic axis from data to pixels."""

    low: float
    high: float
    start: float
    end: float
    log: bool
    marks: tuple[float, ...] = ()
    """Ticks; empty for round numbers."""

    def place(self, value: float) -> float:
        value, low, high = (self._scaled(v) for v in (value, self.low, self.high))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        if self.marks:
            return list(self.marks)
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            for parts in ((1,), (1, 2, 5), range(1, 10)):
                values = [part * 10.0**e for e in range(first, last + 1) for part in parts]
                inside = [value for value in values if self.low <= value <= self.high]
                if len(inside) > 1:
                    return inside
            return [self.low, self.high]
        step = _nice((self.high - self.low) / 5)
        first = math.ceil(self.low / step)
        return [step * n for n in range(first, math.floor(self.high / step) + 1)]

    def _scaled(self, value: float) -> float:
        return math.log10(max(value, 1e-300)) if self.log else value


def plot_svg(plot: Plot) -> str:
    """One plot as an SVG element with a title for screen readers."""
    xs = [x for series in plot.series for x in series.xs]
    ys = [y for series in plot.series for y in _extremes(series)]
    xs, ys = _finite(xs, plot.log_x), _finite(ys, plot.log_y)
    if not xs or not ys:
        return f'<p class="empty">{escape(plot.title)}: nothing measured yet</p>'
    across = _axis(xs, _LEFT, _WIDTH - _RIGHT, log=plot.log_x)
    if plot.log_x and len(set(xs)) <= _MOST_MARKS:
        # Sizes are few powers of 2 and read better than powers of 10.
        across = across._replace(marks=tuple(sorted(set(xs))))
    up = _axis(ys, _HEIGHT - _BOTTOM, _TOP, log=plot.log_y)
    marks = _grid(across, up) + _labels(plot)
    for number, series in enumerate(plot.series):
        marks += _line(series, number, across, up, plot)
    title = escape(plot.title)
    return (
        f'<figure class="plot"><figcaption>{title}</figcaption>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}">'
        f"<title>{title}</title>{''.join(marks)}</svg>{_legend(plot.series)}</figure>"
    )


def _grid(across: _Axis, up: _Axis) -> list[str]:
    marks = []
    for value in across.ticks():
        x = across.place(value)
        marks.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{up.start}"/>')
        marks.append(_text(x, up.start + 16, _number(value), "middle"))
    for value in up.ticks():
        y = up.place(value)
        marks.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        marks.append(_text(_LEFT - 6, y + 4, _number(value), "end"))
    return marks


def _labels(plot: Plot) -> list[str]:
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    return [
        _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, plot.x_label, "middle"),
        f'<text text-anchor="middle" transform="translate(13 {middle}) rotate(-90)">'
        f"{escape(plot.y_label)}</text>",
    ]


def _line(series: Series, number: int, across: _Axis, up: _Axis, plot: Plot) -> list[str]:
    style = f'class="series c{number % _COLOURS}"'
    dash = _DASHES[number // _COLOURS % len(_DASHES)]
    points, marks = [], []
    errors = series.errors or [0.0] * len(series.xs)
    for x, y, error in zip(series.xs, series.ys, errors, strict=True):
        if not math.isfinite(y) or (plot.log_y and y <= 0) or (plot.log_x and x <= 0):
            continue
        left, top = across.place(x), up.place(y)
        points.append(f"{left:.1f},{top:.1f}")
        note = f"{series.name}: {_number(x)}, {_number(y)}"
        if error:
            low = up.place(max(y - error, up.low))
            high = up.place(min(y + error, up.high))
            note += f" ± {_number(error)}"
            marks.append(
                f'<path {style} d="M{left:.1f} {low:.1f}V{high:.1f}'
                f'M{left - 4:.1f} {low:.1f}h8M{left - 4:.1f} {high:.1f}h8"/>'
            )
        marks.append(
            f'<circle {style} cx="{left:.1f}" cy="{top:.1f}" r="3"><title>{escape(note)}</title>'
            "</circle>"
        )
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return [f'<polyline {style}{dashed} points="{" ".join(points)}"/>', *marks]


def _legend(series: Sequence[Series]) -> str:
    items = "".join(
        f'<li class="c{number % _COLOURS} d{number // _COLOURS % len(_DASHES)}"><span></span>'
        f"{escape(one.name)}</li>"
        for number, one in enumerate(series)
    )
    return f'<ul class="legend">{items}</ul>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _extremes(series: Series) -> list[float]:
    errors = series.errors or [0.0] * len(series.ys)
    pairs = list(zip(series.ys, errors, strict=True))
    return [y + sign * error for y, error in pairs for sign in (-1, 1)]


def _finite(values: Sequence[float], log: bool) -> list[float]:
    return [v for v in values if math.isfinite(v) and (v > 0 or not log)]


def _axis(values: Sequence[float], start: float, end: float, *, log: bool) -> _Axis:
    low, high = min(values), max(values)
    if log:
        margin = max((high / low) ** 0.05, 1.02)
        return _Axis(low / margin, high * margin, start, end, log)
    margin = 0.05 * (high - low) or max(abs(high) * 0.05, 1e-6)
    return _Axis(low - margin, high + margin, start, end, log)


def _nice(step: float) -> float:
    """The next of 1, 2 and 5 times a power of ten."""
    unit = 10.0 ** math.floor(math.log10(step))
    return next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= step * 0.999)


def _number(value: float) -> str:
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.1e}"
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
