"""Persistent memory: learned keys and values for each head of an attention."""

from dataclasses import dataclass

import torch
from torch import Tensor

from reluformer.errors import UserError
from reluformer.model.memories.definition import MemorySize, Query, Selector, Table
from reluformer.ops.memory import Scores, read


@dataclass(frozen=True)
class PerHead(Selector):
    """Each head has its own keys and values [heads, slots, D], D = width / heads.

    Used alone, it splits x into heads, with scores x.k / sqrt(D). In an attention, `extend`
    prepends the slots to the context.
    """

    by_head = True

    def check(self, size: MemorySize) -> None:
        """Raise UserError unless heads divide the width."""
        if size.width % size.heads:
            raise UserError(f"heads must divide width = {size.width}, got {size.heads}")

    def tables(self, size: MemorySize) -> dict[str, Table]:
        """Keys and values of unit variance, about that of a projected context."""
        shape = (size.heads, size.slots, size.width // size.heads)
        return {"keys": Table(shape, 1.0), "values": Table(shape, 1.0)}

    def read(self, query: Query) -> tuple[Tensor, Tensor | None]:
        """Outputs of all heads, concatenated; weights are [N, heads, slots]."""
        keys, values = query.tables["keys"], query.tables["values"]
        heads, _, width = keys.shape
        x = query.x.view(-1, heads, width).transpose(0, 1) * width**-0.5
        scores = Scores(x @ keys.transpose(-2, -1), None, width)
        output, weights = read(scores, values, query.weigh, query.dropout_p)
        return output.transpose(0, 1).flatten(1), weights.transpose(0, 1)


def extend(keys: Tensor, values: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Prepend learned pairs to a context.

    Args:
        keys: Learned keys [H, N, D].
        values: Learned values [H, N, D].
        k: Keys of the context [B, Hkv, T, D], Hkv a divisor of H.
        v: Values of the context [B, Hkv, T, D].

    Returns:
        Keys and values [B, H, N + T, D]; each context head is repeated H / Hkv times.
    """
    heads, _, width = keys.shape
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dim() != 4 or tensor.shape[-1] != width:
            raise UserError(f"{name} must be [B, heads, T, {width}], got {list(tensor.shape)}")
        if tensor.shape[1] == 0 or heads % tensor.shape[1]:
            raise UserError(
                f"{name}'s heads must divide the memory's {heads} heads, got {tensor.shape[1]}"
            )
    return _prepend(keys, k), _prepend(values, v)


def _prepend(learned: Tensor, context: Tensor) -> Tensor:
    context = context.repeat_interleave(learned.shape[0] // context.shape[1], dim=1)
    learned = learned.to(context.dtype).expand(context.shape[0], -1, -1, -1)
    return torch.cat((learned, context), dim=2)
