"""CUDA graphs: a step's many small launches recorded once and replayed at once.

Models of this size keep the host busier than the GPU. Batches come in few shapes, so that a graph
for each shape takes the host out of the way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reluformer.data.batches import Batch

Work = Callable[[Batch, Tensor], Tensor]
"""From a batch and numbers about it to losses; adds gradients to what is there already."""

Shape = tuple[torch.Size, torch.Size]


@dataclass(frozen=True)
class _Recorded:
    """A graph, and the memory that it reads and writes each time."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    numbers: Tensor
    losses: Tensor


class Graphs:
    """Runs `work` by replaying a graph for each shape of batch.

    The first batch of a shape runs as it is, which also compiles and warms up what needs it; the
    second is recorded. Gradients must stay where they are between steps (zeroed, not dropped), and
    losses must be taken before the next call overwrites them. Random numbers follow torch's seed.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._seen: set[Shape] = set()
        self._recorded: dict[Shape, _Recorded] = {}
        self._pool: Any = None

    def __call__(self, batch: Batch, numbers: Tensor) -> Tensor:
        """What `work(batch, numbers)` returns."""
        shape = (batch.source.shape, batch.target_in.shape)
        if shape not in self._seen:
            self._seen.add(shape)
            return self._work(batch, numbers)
        if shape not in self._recorded:
            self._recorded[shape] = self._record(batch, numbers)
        recorded = self._recorded[shape]
        for mine, given in zip(recorded.batch.tensors(), batch.tensors(), strict=True):
            mine.copy_(given, non_blocking=True)
        recorded.numbers.copy_(numbers, non_blocking=True)
        recorded.graph.replay()
        return recorded.losses

    def _record(self, batch: Batch, numbers: Tensor) -> _Recorded:
        graph = torch.cuda.CUDAGraph()
        own = [tensor.clone() for tensor in batch.tensors()]
        mine, my_numbers = batch.with_tensors(own), numbers.clone()
        # Graphs never run at the same time, so that all of them can use the same memory.
        # The thread that prepares batches allocates memory meanwhile: no concern of this one.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            losses = self._work(mine, my_numbers)
        self._pool = graph.pool()
        return _Recorded(graph, mine, my_numbers, losses)
