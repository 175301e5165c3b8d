"""Memories that score every slot."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from reluformer.model.memories.definition import Query, Selector, Size, Table, check_between, times
from reluformer.ops.memory import Scores, hide, read
from reluformer.ops.relu_linear import pays, relu_linear
from reluformer.ops.rule import RELU, Rectified


@dataclass(frozen=True)
class AllSlots(Selector):
    """Every slot is scored and read: the feed-forward layer.

    With a table "gate" the weights are multiplied by x G^T, as in gated linear units.
    """

    def tables(self, size: Size) -> dict[str, Table]:
        """Unit-variance x gives unit-variance scores, and ReLU an output of variance 1/2."""
        shape = (size.slots, size.width)
        return {"keys": Table(shape, size.width**-0.5), "values": Table(shape, size.slots**-0.5)}

    def read(self, query: Query) -> tuple[Tensor, Tensor | None]:
        """weights(x K^T) V, or (weights(x K^T) * x G^T) V."""
        if _only_relu(query) and pays(query.x):
            tables = query.tables
            hidden = relu_linear(query.x, tables["keys"], tables.get("keys_bias"))
            return hidden @ tables["values"], None
        scores = Scores(query.against("keys"), None, query.x.shape[-1])
        weigh = query.weigh
        if "gate" in query.tables:
            weigh = times(weigh, query.against("gate"))
        return read(scores, query.tables["values"], weigh, query.dropout_p)


def _only_relu(query: Query) -> bool:
    """Whether the two products have only ReLU between them, and nobody asks for its result."""
    relu = isinstance(query.weigh, Rectified) and query.weigh == RELU
    return relu and not (query.want_weights or query.dropout_p > 0 or "gate" in query.tables)


@dataclass(frozen=True)
class TopK(AllSlots):
    """Every slot is scored; the k best are read, with those that tie with the last of them.

    k              slots that each query reads
    rank_by_value  rank slots by score times length of the value, not by score alone: the k largest
                   terms of the sum
    """

    k: int = 32
    rank_by_value: bool = False

    def check(self, size: Size) -> None:
        """k slots must exist."""
        check_between("k", self.k, 1, size.slots, "slots")

    def read(self, query: Query) -> tuple[Tensor, Tensor | None]:
        """`AllSlots.read` with all but the k best slots hidden."""
        values = query.tables["values"]
        scores = query.against("keys")
        rank = scores.detach()
        if self.rank_by_value:
            rank = rank * values.detach().norm(dim=-1)
        kept = rank >= rank.topk(self.k, dim=-1).values[..., -1:]
        visible = Scores(hide(scores, kept), kept, query.x.shape[-1])
        return read(visible, values, query.weigh, query.dropout_p)


def pattention(scores: Scores) -> Tensor:
    """GELU(s sqrt(n) / |s|): scores scaled to mean square 1 in each row, then GELU (TokenFormer).

    A row of zeros stays zero.
    """
    return functional.gelu(functional.normalize(scores.values, dim=-1) * scores.n.sqrt())
