"""Persistent memory: learned keys and values cut by head, as an attention has them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from reluformer.errors import UserError
from reluformer.model.memories.definition import Query, Selector, Size, Table
from reluformer.ops.memory import Scores, read


@dataclass(frozen=True)
class PerHead(Selector):
    """Each head has its own keys and values [heads, slots, D], D = width / heads.

    On its own it reads x, cut into heads, with scores x.k / sqrt(D). Inside an attention, `extend`
    puts the slots beside the context.
    """

    by_head = True

    def check(self, size: Size) -> None:
        """Heads must have one width."""
        if size.width % size.heads:
            raise UserError(f"heads must divide width = {size.width}, got {size.heads}")

    def tables(self, size: Size) -> dict[str, Table]:
        """Like the keys and values of a context, which have about unit variance."""
        shape = (size.heads, size.slots, size.width // size.heads)
        return {"keys": Table(shape, 1.0), "values": Table(shape, 1.0)}

    def read(self, query: Query) -> tuple[Tensor, Tensor | None]:
        """The heads' outputs side by side; weights are [N, heads, slots]."""
        keys, values = query.tables["keys"], query.tables["values"]
        heads, _, width = keys.shape
        x = query.x.view(-1, heads, width).transpose(0, 1) * width**-0.5
        scores = Scores(x @ keys.transpose(-2, -1), None, width)
        output, weights = read(scores, values, query.weigh, query.dropout_p)
        return output.transpose(0, 1).flatten(1), weights.transpose(0, 1)


def extend(keys: Tensor, values: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v [B, Hkv, T, D] with learned pairs [H, N, D] in front: [B, H, N + T, D] both.

    Where the context has fewer heads, H / Hkv learned heads share each of them.
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
