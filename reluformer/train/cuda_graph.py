"""CUDA graphs: the kernel launches of a step are captured once and replayed.

For models of this size, launching kernels takes the host longer than running them takes the GPU.
Batches come in few shapes, and each shape has its own graph.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from reluformer.data.batches import Batch

Work = Callable[[Batch, Tensor], Tensor]
"""From a batch and its numbers to losses; adds to the gradients of the parameters."""

Shape = tuple[torch.Size, torch.Size]


@dataclass(frozen=True)
class _Captured:
    """A graph, and the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    numbers: Tensor
    losses: Tensor


class Graphs:
    """Runs `work` by replaying one graph for each shape of batch.

    The first batch of a shape runs without a graph, which compiles and warms up kernels. The second
    is captured. Gradients must keep their memory between steps (zeroed, not set to None), and
    losses must be used before the next call overwrites them. Random numbers follow torch's seed.
    """

    def __init__(self, work: Work, parameters: Sequence[Parameter]) -> None:
        self._work, self._parameters = work, parameters
        self._seen: set[Shape] = set()
        self._captured: dict[Shape, _Captured] = {}
        self._pool: Any = None

    def __call__(self, batch: Batch, numbers: Tensor) -> Tensor:
        """Result of `work(batch, numbers)`."""
        shape = (batch.source.shape, batch.target_in.shape)
        if shape not in self._seen:
            self._seen.add(shape)
            return self._work(batch, numbers)
        if shape not in self._captured:
            self._captured[shape] = self._capture(batch, numbers)
        captured = self._captured[shape]
        for static, new in zip(captured.batch.tensors(), batch.tensors(), strict=True):
            static.copy_(new, non_blocking=True)
        captured.numbers.copy_(numbers, non_blocking=True)
        captured.graph.replay()
        return captured.losses

    def _capture(self, batch: Batch, numbers: Tensor) -> _Captured:
        graph = torch.cuda.CUDAGraph()
        static = batch.with_tensors([tensor.clone() for tensor in batch.tensors()])
        static_numbers = numbers.clone()
        # Graphs never run at the same time, so all of them share one memory pool. The thread that
        # prepares batches may allocate memory during the capture: only this thread is checked.
        with (
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
            added_together(self._parameters),
        ):
            losses = self._work(static, static_numbers)
        self._pool = graph.pool()
        return _Captured(graph, static, static_numbers, losses)


@contextmanager
def added_together(parameters: Sequence[Parameter]) -> Iterator[None]:
    """Add the gradients that the block computes to those before it, all at once at its end.

    Autograd would launch a kernel for each parameter, which takes about 3 % of a step.
    """
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
        pairs = [
            (old, parameter.grad)
            for old, parameter in zip(before, parameters, strict=True)
            if old is not None and parameter.grad is not None
        ]
        if pairs:
            olds, news = zip(*pairs, strict=True)
            torch._foreach_add_(olds, news)
    finally:
        for old, parameter in zip(before, parameters, strict=True):
            if old is not None:
                parameter.grad = old
