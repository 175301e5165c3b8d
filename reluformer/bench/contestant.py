"""One implementation of attention on one case."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from reluformer.bench.cases import Case

Run = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
Options = Callable[[int, int], dict[str, Any]]
Context = Callable[[], AbstractContextManager[None]]


def no_options(batch: int, heads: int) -> dict[str, Any]:
    """Attention without options."""
    return {}


@dataclass(frozen=True)
class Contestant:
    """An implementation that is checked against float64 and timed."""

    name: str
    kind: str
    """Name of the attention whose formula it must match."""
    run: Run
    """Maps q, k, v to the output [B, H, Tq, D], then to the requested statistics [B, H, Tq]."""
    case: Case
    is_compiled: bool = False
    """Whether the first call compiles kernels, which workers can do in parallel."""
    options: Options = no_options
    """Keyword arguments of the attention, for a batch size and a number of heads."""
    statistics: int = 0
    """Returned statistics: 0 none, 1 row sums, 2 also sums of w log w."""
    entropy_every: int = 1
    """One block of query rows in this many has its sums of w log w computed; others are 0."""
    power: int = 1
    """Power of ReLU; errors of the scores grow with it."""
    deterministic_run: Run | None = None
    """Function to compare with float64 if `run` is random."""
    context: Context | None = None
    """Settings under which it is timed, in its backward pass, too."""
    absent: str | None = None
    """Reason why it cannot run on this case, if known in advance."""
    work: float = 1.0
    """Its FLOPs as a share of the case's."""
