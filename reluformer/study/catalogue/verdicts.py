"""The verdict that several studies share: whether an attention is as good as softmax."""

import math
from collections.abc import Mapping
from typing import Any

from reluformer.study.catalogue.tables import bleu_of, paired
from reluformer.study.definition import Results
from reluformer.study.findings import Verdict, combine, find_comparison

# BLEU that an attention may be behind and still count as level.
_MARGIN = 0.2


def reaches(
    claim: str, results: Results, labels: Mapping[str, Any], test: tuple[str, str]
) -> Verdict:
    """Whether a group is at most a small margin behind softmax, by the interval.

    Args:
        claim: The claim in words.
        results: Outcomes that count, and comparisons with softmax.
        labels: Labels of the group; softmax has the same but for `attention`.
        test: Test set and level, such as ("test", "sentence").
    """
    rule = (
        f"holds if the 95 % interval of the difference begins at {-_MARGIN} BLEU or above, "
        "does not hold if it ends below, partly in between"
    )
    name = "bleu" if test[1] == "sentence" else "dbleu"
    softmax = {**labels, "attention": "softmax"}
    gap = bleu_of(results.outcomes, name, **labels) - bleu_of(results.outcomes, name, **softmax)
    if math.isinf(gap):
        return combine(claim, [gap > 0], "one of the two diverged", rule)
    comparison = find_comparison(results.comparisons, labels, *test)
    if comparison is None:
        return combine(claim, [None], "–", rule)
    # As printed, so that the number and the verdict agree.
    ends = [round(end, 2) >= -_MARGIN for end in comparison.interval]
    unit = "BLEU" if test[1] == "sentence" else "d-BLEU"
    difference, between = paired(results, test, gap, **labels)
    number = f"{difference:+.2f} {unit}{between}"
    return combine(claim, ends, number, rule)
