"""Paired bootstrap over pooled seeds."""

import random

from reluformer.study.significance import pooled_bootstrap


def _corrupted(texts: list[str], share: float, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join("x" if rng.random() < share else w for w in t.split()) for t in texts]


def test_clear_differences_are_found_and_none_is_invented() -> None:
    rng = random.Random(0)
    reference = [" ".join(rng.choices("abcdefgh", k=12)) for _ in range(40)]
    good = [_corrupted(reference, 0.1, seed) for seed in (1, 2)]
    bad = [_corrupted(reference, 0.3, seed) for seed in (3, 4)]
    found = pooled_bootstrap(reference, good, bad, 200)
    assert found.difference > 5 and found.interval[0] > 0 and found.p_value < 0.05
    assert "nrefs:1" in found.signature
    same = pooled_bootstrap(reference, good, good[::-1], 200)
    assert same.difference == 0 and same.interval == (0, 0) and same.p_value == 1
