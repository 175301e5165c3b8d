"""The work list of packed sequences."""

import itertools
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reluformer.ops.backends.triton.portable.packed_schedule import FIELDS
from reluformer.ops.backends.triton.run_packed import WorkListSize, work_list, work_list_size

ROWS = 32


def items(
    lengths: list[tuple[int, int]], longest: int, *, paired: bool
) -> tuple[list[list[int]], WorkListSize]:
    """Fields of every item, and the size of the list."""
    ends = [[0, *itertools.accumulate(side)] for side in zip(*lengths, strict=True)]
    size = work_list_size(ends[0][-1], len(lengths), longest, ROWS, paired=paired)
    cu_q, cu_k = (torch.tensor(each, dtype=torch.int32) for each in ends)
    work = work_list(cu_q, cu_k, size, ROWS, paired=paired)
    count = int(work[0])
    assert count <= size.total
    return work[1:].view(-1, FIELDS.value)[:count].tolist(), size


@settings(deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), min_size=1, max_size=9),
    paired=st.booleans(),
)
def test_every_tile_has_an_item_and_long_sequences_come_first(
    lengths: list[tuple[int, int]], paired: bool
) -> None:
    longest = max(1, *(queries for queries, _ in lengths))
    result, _ = items(lengths, longest, paired=paired)
    starts = [[0, *itertools.accumulate(side)] for side in zip(*lengths, strict=True)]
    wanted = []
    for b in sorted(range(len(lengths)), key=lambda b: -lengths[b][1]):
        count = math.ceil(lengths[b][0] / ROWS / (2 if paired else 1))
        wanted += [[len(wanted), count, starts[0][b], starts[1][b], *lengths[b]]] * count
    assert result == wanted


def test_many_sequences_keep_their_order() -> None:
    lengths = [(1 + 7 * b % 40, 1 + 11 * b % 50) for b in range(200)]
    result, _ = items(lengths, 40, paired=False)
    assert [each[2] for each in result] == sorted(each[2] for each in result)
    assert len(result) == sum(math.ceil(queries / ROWS) for queries, _ in lengths)


def test_an_empty_list_begins_with_an_empty_item() -> None:
    cu = torch.zeros(4, dtype=torch.int64)
    work = work_list(cu, cu, WorkListSize(1, 1), ROWS, paired=True)
    assert work.tolist() == [0, 0, 1, 0, 0, 0, 0]


def test_rows_past_the_promised_length_have_no_item() -> None:
    result, size = items([(100, 10), (30, 20)], 40, paired=False)
    assert size.longest == 2 and len(result) == 3
