"""Tables and plots that several studies share."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from reluformer.study.cells import Outcome, Summary, group, summarise
from reluformer.study.definition import Results
from reluformer.study.findings import Comparison, Plot, Series, Table, find_comparison

Format = Callable[[Summary], str]


def decimals(places: int) -> Format:
    """Mean with some decimals, and the spread where there are several seeds."""

    def show(summary: Summary) -> str:
        if not summary.seeds:
            return "–"
        text = f"{summary.mean:.{places}f}"
        return text if summary.seeds == 1 else f"{text} ± {summary.spread:.{places}f}"

    return show


def percent(summary: Summary) -> str:
    """Mean as a percentage."""
    return "–" if not summary.seeds else f"{100 * summary.mean:.1f} %"


def significant(summary: Summary) -> str:
    """Mean with three significant digits, and the spread where there are several seeds."""
    if not summary.seeds:
        return "–"
    spread = f" ± {summary.spread:.1g}" if summary.seeds > 1 else ""
    return f"{summary.mean:.3g}{spread}"


def thousands(summary: Summary) -> str:
    """Mean in thousands."""
    return "–" if not summary.seeds else f"{summary.mean / 1000:,.0f} k"


def millions(summary: Summary) -> str:
    """Mean in millions."""
    return "–" if not summary.seeds else f"{summary.mean / 1e6:,.1f} M"


def group_table(
    title: str,
    results: Results,
    by: Sequence[str],
    columns: Mapping[str, tuple[str, Format]],
    compared: tuple[str, str] | None = None,
) -> Table:
    """One row a group of cells.

    Args:
        title: Heading.
        results: Outcomes and comparisons of a study.
        by: Labels that form a group and name its row.
        columns: Heading to (value, format).
        compared: Test set and level of the paired differences in the last column.
    """
    rows = []
    for key, members in group(results.outcomes, *by).items():
        labels = dict(zip(by, key, strict=True))
        row = [", ".join(map(str, key)), _seeds(members)]
        row += [show(summarise(members, value)) for value, show in columns.values()]
        if compared is not None:
            row.append(show_comparison(find_comparison(results.comparisons, labels, *compared)))
        rows.append(row)
    heading = [", ".join(by), "seeds", *columns]
    return Table(title, heading + ["difference (95 %)"] * (compared is not None), rows)


def show_comparison(comparison: Comparison | None) -> str:
    """A paired difference with its interval."""
    if comparison is None:
        return ""
    low, high = comparison.interval
    return f"{comparison.difference:+.2f} ({low:+.2f} to {high:+.2f})"


def paired(
    results: Results, test: tuple[str, str], means: float, *, negate: bool = False, **labels: Any
) -> tuple[float, str]:
    """A group's paired difference, and its 95 % interval with its seeds as text behind a unit.

    Args:
        results: Outcomes and comparisons of a study.
        test: Test set and level.
        means: Mean score of the group minus that of the baseline, from rounded scores. It is the
            result, without interval, if the groups were not compared.
        negate: Return the baseline minus the group.
        **labels: Labels of the group.
    """
    comparison = find_comparison(results.comparisons, labels, *test)
    if comparison is None:
        return -means if negate else means, ""
    (low, high), difference = comparison.interval, comparison.difference
    if negate:
        low, high, difference = -high, -low, -difference
    return difference, f" (95 %: {low:+.2f} to {high:+.2f}, {seeds(comparison.seeds)})"


def seeds(count: int) -> str:
    """A number of seeds in words."""
    return f"{count} seed{'s' * (count > 1)}"


def lines_over(outcomes: Sequence[Outcome], x: str, by: str, value: str) -> list[Series]:
    """A series for each value of label `by`, over label `x`, with spreads over seeds."""
    series = []
    for (name,), members in group(outcomes, by).items():
        points = sorted(
            (float(key[0]), summarise(same, value)) for key, same in group(members, x).items()
        )
        points = [(position, summary) for position, summary in points if summary.seeds]
        if points:
            series.append(
                Series(
                    str(name),
                    [position for position, _ in points],
                    [summary.mean for _, summary in points],
                    [summary.spread for _, summary in points],
                )
            )
    return series


def curves(outcomes: Sequence[Outcome], name: Callable[[Outcome], str]) -> Plot:
    """Dev loss while training, of the first seed of each name."""
    series: dict[str, Series] = {}
    for outcome in sorted(outcomes, key=lambda o: int(o.labels.get("seed", 0))):
        points = [p for p in outcome.detail.get("curve", []) if "nll" in p.get("dev", {})]
        if points:
            xs = [point["tokens"] / 1e6 for point in points]
            ys = [point["dev"]["nll"] for point in points]
            series.setdefault(name(outcome), Series(name(outcome), xs, ys))
    axis = "million target tokens"
    return Plot("Dev loss while training, first seed", axis, "nats a token", list(series.values()))


def mean_of(
    outcomes: Sequence[Outcome], value: str, *, diverged: float = math.nan, **labels: Any
) -> float:
    """Mean of a value over the finished outcomes with some labels; NaN if there are none.

    Args:
        outcomes: Outcomes of a study.
        value: Name of the value.
        diverged: The mean if there are outcomes and all of them diverged.
        **labels: Labels of the group.
    """
    chosen = [o for o in outcomes if all(o.labels.get(k) == v for k, v in labels.items())]
    if chosen and not any(outcome.finished for outcome in chosen):
        return diverged
    return summarise(chosen, value).mean


def bleu_of(outcomes: Sequence[Outcome], value: str = "bleu", **labels: Any) -> float:
    """Mean BLEU of a group; minus infinity if all of its outcomes diverged."""
    return mean_of(outcomes, value, diverged=-math.inf, **labels)


def _seeds(members: Sequence[Outcome]) -> str:
    diverged = sum(not outcome.finished for outcome in members)
    return str(len(members)) if not diverged else f"{len(members)}, {diverged} diverged"
