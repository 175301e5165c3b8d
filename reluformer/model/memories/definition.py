"""Selectors: which slots of a memory a query reads, and the tensors that this needs."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional

from reluformer.config.schema import check_fields
from reluformer.errors import UserError
from reluformer.ops.memory import Weigh


@dataclass(frozen=True)
class MemorySize:
    """Sizes of a memory."""

    width: int
    """Width of queries, keys and values."""
    slots: int
    """Number of key-value pairs."""
    heads: int
    """Number of read heads."""


@dataclass(frozen=True)
class Table:
    """Shape and initial distribution of one learned tensor."""

    shape: tuple[int, ...]
    deviation: float = 0.0
    """Standard deviation of the normal distribution that initial values are drawn from."""
    unit_rows: bool = False
    """Scale each initial row to length 1."""


@dataclass(frozen=True)
class Query:
    """One read of a memory."""

    x: Tensor
    """Queries [N, width]."""
    tables: Mapping[str, Tensor]
    """Learned tensors by name: "keys", "values" and those that the selector adds."""
    weigh: Weigh
    """Function from scores to weights."""
    dropout_p: float = 0.0
    """Dropout rate of the weights."""
    training: bool = False
    """Whether the selector may add noise."""
    want_weights: bool = False
    """Whether the weights over all slots are returned."""

    def against(self, name: str) -> Tensor:
        """Products [N, rows] of x and the rows of table `name`, plus the table's bias if any."""
        return functional.linear(self.x, self.tables[name], self.tables.get(f"{name}_bias"))


@dataclass(frozen=True)
class Selector(ABC):
    """Selects the slots that a query reads. The fields of a subclass are the options of a kind."""

    by_head: ClassVar[bool] = False
    """Whether keys are split by head: the kind then takes `heads` and has no biases."""

    def __post_init__(self) -> None:
        check_fields(self)

    def check(self, size: MemorySize) -> None:
        """Raise UserError for sizes or options that cannot work; the default accepts all."""
        return

    @abstractmethod
    def tables(self, size: MemorySize) -> dict[str, Table]:
        """Learned tensors by name."""

    @abstractmethod
    def read(self, query: Query) -> tuple[Tensor, Tensor | None]:
        """Output [N, width], and weights [N, slots] if `query.want_weights`."""

    def expert_probabilities(self, query: Query) -> Tensor | None:
        """Probability of each expert for each query, [N, experts]; None without experts."""
        return None


def check_between(name: str, value: int, low: int, high: int, limit: str) -> None:
    """Raise UserError unless `value` is an integer in [low, high]; `limit` names `high`."""
    if not isinstance(value, int) or not low <= value <= high:
        raise UserError(f"{name} must be an integer from {low} to {high} ({limit}), got {value!r}")


def times(weigh: Weigh, factor: Tensor) -> Weigh:
    """The weight function with its weights multiplied by `factor`."""
    return lambda scores: weigh(scores) * factor
