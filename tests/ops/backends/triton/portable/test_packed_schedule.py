"""The list of work on packed sequences."""

import itertools
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reluformer.ops.backends.triton.portable import packed_schedule

ROWS = 32


def entries(
    lengths: list[tuple[int, int]], longest: int, *, paired: bool
) -> tuple[list[list[int]], packed_schedule.Size]:
    """Fields of every entry, and the room there is for them."""
    ends = [[0, *itertools.accumulate(side)] for side in zip(*lengths, strict=True)]
    room = packed_schedule.size(ends[0][-1], len(lengths), longest, ROWS, paired=paired)
    cu_q, cu_k = (torch.tensor(each, dtype=torch.int32) for each in ends)
    work = packed_schedule.schedule(cu_q, cu_k, room, ROWS, paired=paired)
    count = int(work[0])
    assert count <= room.most
    return work[1:].view(-1, packed_schedule.FIELDS.value)[:count].tolist(), room


@settings(deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), min_size=1, max_size=9),
    paired=st.booleans(),
)
def test_every_tile_has_its_entry_and_long_sequences_come_first(
    lengths: list[tuple[int, int]], paired: bool
) -> None:
    longest = max(1, *(queries for queries, _ in lengths))
    found, _ = entries(lengths, longest, paired=paired)
    starts = [[0, *itertools.accumulate(side)] for side in zip(*lengths, strict=True)]
    wanted = []
    for b in sorted(range(len(lengths)), key=lambda b: -lengths[b][1]):
        count = math.ceil(lengths[b][0] / ROWS / (2 if paired else 1))
        wanted += [[len(wanted), count, starts[0][b], starts[1][b], *lengths[b]]] * count
    assert found == wanted


def test_many_sequences_come_in_their_own_order() -> None:
    lengths = [(1 + 7 * b % 40, 1 + 11 * b % 50) for b in range(200)]
    found, _ = entries(lengths, 40, paired=False)
    assert [each[2] for each in found] == sorted(each[2] for each in found)
    assert len(found) == sum(math.ceil(queries / ROWS) for queries, _ in lengths)


def test_of_nothing_one_entry_of_no_rows_can_be_read() -> None:
    cu = torch.zeros(4, dtype=torch.int64)
    work = packed_schedule.schedule(cu, cu, packed_schedule.Size(1, 1), ROWS, paired=True)
    assert work.tolist() == [0, 0, 1, 0, 0, 0, 0]


def test_what_is_longer_than_was_said_has_no_room() -> None:
    found, room = entries([(100, 10), (30, 20)], 40, paired=False)
    assert room.longest == 2 and len(found) == 3
