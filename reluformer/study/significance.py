"""Paired bootstrap between groups of cells, with the seeds of a group pooled."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np

from reluformer.evaluation.cached_metric import bleu_of_counts, resampled_bleu
from reluformer.evaluation.results import Level
from reluformer.study.cells import Outcome, group
from reluformer.study.counts import Counts, load_counts
from reluformer.study.definition import Contrast
from reluformer.study.findings import Comparison


def compare_cells(
    contrast: Contrast, outcomes: Sequence[Outcome], root: Path, samples: int
) -> list[Comparison]:
    """Compare every group with the baseline group that shares its other labels.

    Args:
        contrast: Labels of groups and of the baseline.
        outcomes: Cells of the study.
        root: Folder that holds the cells.
        samples: Draws of the bootstrap.
    """
    translated = [o for o in contrast.select(outcomes) if o.finished and o.detail.get("hypotheses")]
    groups = group(translated, *contrast.by)
    comparisons = []
    for key, members in groups.items():
        labels = dict(zip(contrast.by, key, strict=True))
        base_key = tuple(contrast.baseline.get(name, labels[name]) for name in contrast.by)
        if base_key == key or base_key not in groups:
            continue
        baseline = dict(zip(contrast.by, base_key, strict=True))
        for test in members[0].detail["hypotheses"]:
            for level in get_args(Level):
                systems, bases = (
                    [load_counts(root / o.name, test, level) for o in cells]
                    for cells in (members, groups[base_key])
                )
                result = pooled_bootstrap(systems, bases, samples)
                if result is not None:
                    seeds = len(members)
                    comparisons.append(Comparison(test, level, labels, baseline, seeds, *result))
    return comparisons


class Bootstrap(NamedTuple):
    """Result of the paired bootstrap, in the order of the last fields of `Comparison`."""

    difference: float
    interval: tuple[float, float]
    p_value: float
    signature: str


def pooled_bootstrap(
    systems: Sequence[Counts | None], bases: Sequence[Counts | None], samples: int
) -> Bootstrap | None:
    """Bootstrap the difference of mean BLEU between two groups of systems.

    All systems are scored on the same draws of segments; scores are averaged over the seeds of a
    group within each draw. The result is None if counts of a system are missing, or if the systems
    translated test sets of different sizes.
    """
    counts = [system for system in [*systems, *bases] if system is not None]
    count = len(systems)
    if not count or not bases or len(counts) < count + len(bases):
        return None
    tables = [system.table for system in counts]
    if len({len(table) for table in tables}) > 1:
        return None
    values = [bleu_of_counts(table) for table in tables]
    difference = float(np.mean(values[:count]) - np.mean(values[count:]))
    draws = resampled_bleu(tables, samples)
    differences = draws[:count].mean(axis=0) - draws[count:].mean(axis=0)
    low, high = (float(value) for value in np.percentile(differences, [2.5, 97.5]))
    # As in sacreBLEU: how often centred differences reach the one that was observed.
    centred = np.abs(differences - differences.mean())
    p_value = float((np.sum(centred >= abs(difference)) + 1) / (samples + 1))
    # Enough digits that rounding to two when they are printed is the only rounding.
    interval = (round(low, 5), round(high, 5))
    return Bootstrap(round(difference, 5), interval, round(p_value, 4), counts[0].signature)
