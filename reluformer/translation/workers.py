"""Translation work divided among the ranks of a torchrun job."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist

from reluformer.processes import DeviceKind, processes


class Unit(NamedTuple):
    """Lines that must be translated together: one line, or a document and the line after it."""

    numbers: list[int]
    """Line numbers in the stream."""
    lines: list[str]


Work = Callable[[list[Unit]], list[list[str]]]
"""From units to the translated lines of each."""


class Workers:
    """The ranks that share the work; by default this process alone.

    Rank 0 calls `map` inside `leading`, the other ranks call `serve`.
    """

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        """Take part as `rank` of `world`; the process group is initialised already."""
        self.rank, self.world = rank, world
        # Python objects need a CPU backend, also where the devices communicate over NCCL.
        self._group: Any = dist.new_group(backend="gloo") if world > 1 else None

    def map(self, work: Work, units: list[Unit]) -> list[list[str]]:
        """Apply `work` to all units, with long and short units dealt evenly to the ranks."""
        if self.world == 1:
            return work(units)
        order = sorted(range(len(units)), key=lambda i: -sum(map(len, units[i].lines)))
        hands = [order[rank :: self.world] for rank in range(self.world)]
        own_units = self._scatter([[units[index] for index in hand] for hand in hands])
        gathered: list[Any] = [None] * self.world
        dist.gather_object(work(own_units), gathered, group=self._group)
        results = {
            index: lines
            for hand, part in zip(hands, gathered, strict=True)
            for index, lines in zip(hand, part, strict=True)
        }
        return [results[index] for index in range(len(units))]

    def serve(self, work: Work) -> None:
        """Apply `work` to the units that rank 0 sends, until it tells this rank to stop."""
        while (units := self._scatter(None)) is not None:
            dist.gather_object(work(units), None, group=self._group)

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Surround all calls of `map` by rank 0; on exit, the other ranks are told to stop."""
        yield
        if self.world > 1:
            self._scatter([None] * self.world)

    def _scatter(self, parts: list[Any] | None) -> Any:
        received: list[Any] = [None]
        dist.scatter_object_list(received, parts, group=self._group)
        return received[0]


@contextmanager
def join_workers(device: DeviceKind | None) -> Iterator[Workers]:
    """Join the ranks that torchrun started; without torchrun there is one worker."""
    with processes(device) as group:
        yield Workers(group.rank, group.world)
