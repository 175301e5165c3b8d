"""Significance of differences between systems: paired bootstrap resampling."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
from sacrebleu.significance import PairedTest

from reluformer.evaluation.cached_metric import CachedMetric, Metric
from reluformer.evaluation.results import Comparison, Level


def compare(
    systems: Mapping[str, Sequence[str]],
    metrics: Mapping[Metric, CachedMetric],
    level: Level,
    samples: int,
) -> Iterator[Comparison]:
    """Compare every system with the first by every metric.

    Args:
        systems: Segments of each system, by name.
        metrics: Metrics with the cached counts of all systems.
        level: Kind of the segments, for the results.
        samples: Number of bootstrap samples.

    Yields:
        One comparison for each metric and system, with sacreBLEU's p-value and a confidence
        interval of the difference.
    """
    if not metrics:
        return
    named: list[Any] = list(systems.items())
    sacrebleu_metrics: Any = {name: metric.metric for name, metric in metrics.items()}
    test = PairedTest(named, sacrebleu_metrics, None, test_type="bs", n_samples=samples)
    signatures, results = cast("tuple[dict[str, Any], dict[str, Any]]", test())
    for name, metric in metrics.items():
        baseline, *others = results[name]
        resampled = metric.resampled(list(systems.values()), samples)
        counts = [metric.counts(text) for text in systems.values()]
        for index, ((system, _), other) in enumerate(zip(named[1:], others, strict=True), 1):
            # The test counts differences that exceed the observed one. Between systems with equal
            # counts that is none, and the p-value would be low.
            p_value = 1.0 if counts[index] == counts[0] else other.p_value
            low, high = np.percentile(resampled[index] - resampled[0], [2.5, 97.5])
            yield Comparison(
                name,
                level,
                system,
                baseline.score,
                other.score,
                p_value,
                (float(low), float(high)),
                str(signatures[name]),
            )
