"""Product keys: exact search for the best of many slots through two short searches."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from reluformer.errors import UserError
from reluformer.model.memories.definition import MemorySize, Query, Selector, Table, check_between
from reluformer.ops.memory import Scores


@dataclass(frozen=True)
class ProductKeys(Selector):
    """Slot (i, j) has the key [a_i, b_j], from two tables of sqrt(slots) half keys.

    The score of a slot is q1.a_i + q2.b_j, so the k best slots are pairs of the k best halves: the
    search is exact and costs O(sqrt(slots)) products. Each head has its own query projection
    q = W x and its own half keys. All heads share the values, and their outputs are added. Queries
    have no batch norm, unlike in the paper: a result does not depend on the rest of the batch.
    """

    k: int = 32
    """Number of slots that each head reads."""
    by_head = True

    def check(self, size: MemorySize) -> None:
        """Raise UserError unless slots is a square, width is even and k is at most slots."""
        root = math.isqrt(size.slots)
        if root * root != size.slots:
            raise UserError(
                f"slots must be a perfect square for product keys, such as {root**2} or "
                f"{(root + 1) ** 2}, got {size.slots}"
            )
        if size.width % 2:
            raise UserError(f"width must be even for product keys, got {size.width}")
        check_between("k", self.k, 1, size.slots, "slots")

    def tables(self, size: MemorySize) -> dict[str, Table]:
        """Values start as in a dense memory with heads * k slots, the number that is read."""
        root = math.isqrt(size.slots)
        deviation = size.width**-0.5
        return {
            "queries": Table((size.heads * size.width, size.width), deviation),
            "keys": Table((2, size.heads, root, size.width // 2), deviation),
            "values": Table((size.slots, size.width), (size.heads * self.k) ** -0.5),
        }

    def read(self, query: Query) -> tuple[Tensor, Tensor | None]:
        """The sum over heads of weights(scores of the k best slots) V."""
        values = query.tables["values"]
        scores, slots = self.select(query)
        weights = query.weigh(Scores(scores, None, query.x.shape[-1])).to(values.dtype)
        kept = weights
        if query.dropout_p > 0:
            kept = torch.dropout(weights, query.dropout_p, train=True)
        # As `ops.memory.read` on values[slots], without a copy of heads * k rows for each query.
        output = functional.embedding_bag(
            slots.flatten(1), values, mode="sum", per_sample_weights=kept.flatten(1)
        )
        if not query.want_weights:
            return output, None
        over_all = weights.new_zeros(len(output), len(values))
        return output, over_all.scatter_add(-1, slots.flatten(1), weights.flatten(1))

    def select(self, query: Query) -> tuple[Tensor, Tensor]:
        """Scores and indices [N, heads, k] of the k best slots of each head, best first."""
        _, heads, root, half = query.tables["keys"].shape
        queries = query.against("queries").view(-1, heads, 2, half)
        first, second = (
            torch.einsum("nhd,hrd->nhr", queries[:, :, part], keys).topk(min(self.k, root), dim=-1)
            for part, keys in enumerate(query.tables["keys"])
        )
        sums = first.values.unsqueeze(-1) + second.values.unsqueeze(-2)
        indices = first.indices.unsqueeze(-1) * root + second.indices.unsqueeze(-2)
        best = sums.flatten(-2).topk(self.k, dim=-1)
        return best.values, indices.flatten(-2).gather(-1, best.indices)
