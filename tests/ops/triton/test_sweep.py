"""What the tile benchmarks try; their timing needs a GPU."""

import pytest

from benchmarks import backward
from benchmarks import tiles as sweep
from reluformer.ops.triton import tiles


@pytest.mark.parametrize("case", sweep.SENTENCES + sweep.LONG, ids=str)
def test_the_tables_choice_is_among_the_candidates(case: sweep.Case) -> None:
    for kernel in sweep.KERNELS:
        tried = sweep.candidates(case, kernel)
        assert tried[0] in tiles.every(kernel, case.width, itemsize=2)
        assert len(set(tried)) == len(tried) >= 5


def test_the_tables_tiles_for_all_gradients_are_timed_first() -> None:
    for (width, causal), names in backward.VARIANTS.items():
        tried = [backward.tile_of(name) for name in names]
        assert tried[0] == tiles.pick_fused(width, causal, tiles.FUSED_FROM, itemsize=2)
        assert len(set(tried)) == len(tried)
