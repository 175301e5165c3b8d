"""Memories that compute the score of every slot."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from reluformer.errors import UserError
from reluformer.model.memories.definition import (
    MemorySize,
    Query,
    Selector,
    Table,
    check_between,
    times,
)
from reluformer.ops.memory import Scores, hide, read
from reluformer.ops.relu_linear import is_faster, relu_linear
from reluformer.ops.rule import RELU, Rectified


@dataclass(frozen=True)
class AllSlots(Selector):
    """Reads every slot: the feed-forward layer.

    With a table "gate", weights are multiplied by x G^T, as in gated linear units.
    """

    temperature: float = 1.0
    """Divisor of the scores; above 1, softmax weights are flatter."""

    def check(self, size: MemorySize) -> None:
        """Raise UserError unless the temperature is positive."""
        if not self.temperature > 0:
            raise UserError(f"temperature must be greater than 0, got {self.temperature}")

    def tables(self, size: MemorySize) -> dict[str, Table]:
        """For unit-variance x, scores have variance 1 and the ReLU output has variance 1/2."""
        shape = (size.slots, size.width)
        return {"keys": Table(shape, size.width**-0.5), "values": Table(shape, size.slots**-0.5)}

    def read(self, query: Query) -> tuple[Tensor, Tensor | None]:
        """weights(x K^T) V, or (weights(x K^T) * x G^T) V."""
        if self.temperature == 1 and _only_relu(query) and is_faster(query.x):
            tables = query.tables
            hidden = relu_linear(query.x, tables["keys"], tables.get("keys_bias"))
            return hidden @ tables["values"], None
        scores = Scores(self.scores(query), None, query.x.shape[-1])
        weigh = query.weigh
        if "gate" in query.tables:
            weigh = times(weigh, query.against("gate"))
        return read(scores, query.tables["values"], weigh, query.dropout_p)

    def scores(self, query: Query) -> Tensor:
        """x K^T divided by the temperature, [N, slots]."""
        scores = query.against("keys")
        return scores if self.temperature == 1 else scores / self.temperature


def _only_relu(query: Query) -> bool:
    """Whether plain ReLU is all between the two products, and its result is not needed."""
    relu = isinstance(query.weigh, Rectified) and query.weigh == RELU
    return relu and not (query.want_weights or query.dropout_p > 0 or "gate" in query.tables)


@dataclass(frozen=True)
class TopK(AllSlots):
    """Reads the k slots with the highest scores, and every slot that ties with the last of them."""

    k: int = 32
    """Number of slots that each query reads."""
    rank_by_value: bool = False
    """Rank slots by score times the norm of the value, which selects the k largest terms."""

    def check(self, size: MemorySize) -> None:
        """Raise UserError unless k is at most the number of slots."""
        super().check(size)
        check_between("k", self.k, 1, size.slots, "slots")

    def read(self, query: Query) -> tuple[Tensor, Tensor | None]:
        """`AllSlots.read` with all but the k best slots hidden."""
        values = query.tables["values"]
        scores = self.scores(query)
        rank = scores.detach()
        if self.rank_by_value:
            rank = rank * values.detach().norm(dim=-1)
        kept = rank >= rank.topk(self.k, dim=-1).values[..., -1:]
        visible = Scores(hide(scores, kept), kept, query.x.shape[-1])
        return read(visible, values, query.weigh, query.dropout_p)


def pattention(scores: Scores) -> Tensor:
    """GELU(s sqrt(n) / |s|), scores scaled to mean square 1 in each row (TokenFormer).

    A row of zeros stays zero.
    """
    return functional.gelu(functional.normalize(scores.values, dim=-1) * scores.n.sqrt())
