"""Paired bootstrap between groups of cells, with the seeds of a group pooled."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reluformer.evaluation.aligned_files import read_aligned
from reluformer.evaluation.cached_metric import CachedMetric
from reluformer.study.cells import Outcome, group
from reluformer.study.definition import Contrast
from reluformer.study.findings import Comparison


def compare_cells(
    contrast: Contrast,
    outcomes: Sequence[Outcome],
    root: Path,
    references: dict[str, Path],
    samples: int,
) -> list[Comparison]:
    """Compare every group with the baseline group that shares its other labels.

    Args:
        contrast: Labels of groups and of the baseline.
        outcomes: Cells of the study.
        root: Folder that holds the cells.
        references: Reference file by test set, for outcomes that do not keep their own.
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
            pair = (members, groups[base_key])
            comparisons += _compare(test, labels, baseline, pair, (root, references), samples)
    return comparisons


def _compare(
    test: str,
    labels: dict[str, Any],
    baseline: dict[str, Any],
    pair: tuple[list[Outcome], list[Outcome]],
    files: tuple[Path, dict[str, Path]],
    samples: int,
) -> list[Comparison]:
    root, references = files
    systems, bases = pair
    cut = root / systems[0].name / f"{test}.target.txt"
    reference = cut if cut.is_file() else references[test]
    levels = ["sentence"]
    if "d-BLEU" in systems[0].detail["scores"].get(test, {}):
        levels.append("document")
    comparisons = []
    for level in levels:
        paths = [root / o.name / f"{test}.hypothesis" for o in [*systems, *bases]]
        if not all(path.is_file() for path in paths):
            return []
        right, texts = read_aligned(reference, paths, documents=level == "document")
        segments = [[" ".join(document) for document in text] for text in texts]
        result = pooled_bootstrap(
            [" ".join(document) for document in right],
            segments[: len(systems)],
            segments[len(systems) :],
            samples,
        )
        comparisons.append(Comparison(test, level, labels, baseline, len(systems), *result))
    return comparisons


class Bootstrap(NamedTuple):
    """Result of the paired bootstrap, in the order of the last fields of `Comparison`."""

    difference: float
    interval: tuple[float, float]
    p_value: float
    signature: str


def pooled_bootstrap(
    reference: list[str], systems: list[list[str]], bases: list[list[str]], samples: int
) -> Bootstrap:
    """Bootstrap the difference of mean BLEU between two groups of systems.

    All systems are scored on the same draws of segments; scores are averaged over the seeds of a
    group within each draw.
    """
    scorer = CachedMetric("BLEU", reference, [*systems, *bases], "13a")
    values = [scorer.score(text) for text in [*systems, *bases]]
    count = len(systems)
    difference = float(np.mean(values[:count]) - np.mean(values[count:]))
    draws = scorer.resampled([*systems, *bases], samples)
    differences = draws[:count].mean(axis=0) - draws[count:].mean(axis=0)
    low, high = (float(value) for value in np.percentile(differences, [2.5, 97.5]))
    # As in sacreBLEU: how often centred differences reach the one that was observed.
    centred = np.abs(differences - differences.mean())
    p_value = float((np.sum(centred >= abs(difference)) + 1) / (samples + 1))
    interval = (round(low, 3), round(high, 3))
    return Bootstrap(round(difference, 3), interval, round(p_value, 4), scorer.signature)
