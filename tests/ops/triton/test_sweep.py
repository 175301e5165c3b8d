"""What the tile benchmark tries; its timing needs a GPU."""

import pytest

from benchmarks import tiles as sweep
from reluformer.ops.triton import tiles


@pytest.mark.parametrize("case", sweep.SENTENCES + sweep.LONG, ids=str)
def test_the_tables_choice_is_among_the_candidates(case: sweep.Case) -> None:
    for kernel in sweep.KERNELS:
        tried = sweep.candidates(case, kernel)
        assert tried[0] in tiles.every(kernel, case.width, itemsize=2)
        assert len(set(tried)) == len(tried) >= 5
