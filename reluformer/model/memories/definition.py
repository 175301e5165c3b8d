"""What a selector is: how a query meets the slots of a memory, and with which tables."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional

from reluformer.errors import UserError
from reluformer.ops.memory import Weigh


@dataclass(frozen=True)
class Size:
    """Width of the queries and the values, number of slots, number of heads."""

    width: int
    slots: int
    heads: int


@dataclass(frozen=True)
class Table:
    """A tensor to learn: its shape, and the deviation of the normal numbers it starts with."""

    shape: tuple[int, ...]
    deviation: float = 0.0
    unit_rows: bool = False
    """The rows are then scaled to length 1 each."""


@dataclass(frozen=True)
class Query:
    """One read of a memory.

    x             [N, width]
    tables        the memory's tensors by name: "keys", "values" and what the selector adds
    weigh         function from scores to weights
    dropout_p     dropout on the weights
    training      whether the selector may add noise of its own
    want_weights  whether the weights over all slots are to be returned
    """

    x: Tensor
    tables: Mapping[str, Tensor]
    weigh: Weigh
    dropout_p: float = 0.0
    training: bool = False
    want_weights: bool = False

    def against(self, name: str) -> Tensor:
        """x against the rows of a table [rows, width], plus its bias if there is one: [N, rows]."""
        return functional.linear(self.x, self.tables[name], self.tables.get(f"{name}_bias"))


@dataclass(frozen=True)
class Selector(ABC):
    """How a query meets the slots. Subclasses are dataclasses whose fields are a kind's options."""

    by_head: ClassVar[bool] = False
    """Keys are cut by head: the kind takes `heads`, and has no biases."""

    def check(self, size: Size) -> None:
        """Refuse sizes and options that cannot work; by default there are none."""
        return

    @abstractmethod
    def tables(self, size: Size) -> dict[str, Table]:
        """The tensors to learn, by name."""

    @abstractmethod
    def read(self, query: Query) -> tuple[Tensor, Tensor | None]:
        """The output [N, width], and the weights [N, slots] if the query wants them."""

    def penalty(self, query: Query) -> Tensor:
        """A scalar that the training loss may add; 0 where a kind has none."""
        return query.x.new_zeros(())


def check_between(name: str, value: int, low: int, high: int, limit: str) -> None:
    """Refuse an integer option outside [low, high]; `limit` says what `high` is."""
    if not isinstance(value, int) or not low <= value <= high:
        raise UserError(f"{name} must be an integer from {low} to {high} ({limit}), got {value!r}")


def times(weigh: Weigh, factor: Tensor) -> Weigh:
    """The weight function with its weights multiplied by `factor`."""
    return lambda scores: weigh(scores) * factor
