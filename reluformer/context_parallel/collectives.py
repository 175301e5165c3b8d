"""The two collectives of context parallelism, each the gradient of the other.

A sequence over R ranks is 2R chunks, of which rank r holds number r and number 2R - 1 - r: its
*shard*, [..., 2c, ...] with c tokens in a chunk. `gather` makes the whole sequence of all shards,
`scatter_sum` adds whole tensors up and leaves each rank its shard of the sum. Sums are float32 at
least; other traffic has the dtype of the tensors. Several tensors that are summed travel side by
side, in one collective.
"""

# Builds of torch without distributed support have no `dist.ProcessGroup` to annotate with.
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather(shard: Tensor, dim: int, group: dist.ProcessGroup | None) -> Tensor:
    """The whole sequence [..., 2Rc, ...], in its order along `dim`, of shards [..., 2c, ...].

    The gradient of a shard is the sum over the ranks of what each found for it.
    """
    whole: Tensor = _Gather.apply(shard, dim, group)  # type: ignore[no-untyped-call]
    return whole


def scatter_sum(
    wholes: Sequence[Tensor], dim: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, ...]:
    """This rank's shards [..., 2c, ..., w] of the sums over the ranks of [..., 2Rc, ..., w].

    The tensors differ in their last dimension alone, which is not `dim`, and in their dtypes.
    """
    shards: tuple[Tensor, ...] = _ScatterSum.apply(dim, group, *wholes)  # type: ignore[no-untyped-call]
    return shards


def add_up(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> tuple[Tensor, ...]:
    """The sums of the ranks' tensors [..., w], on every rank, without gradient.

    The tensors differ in their last dimension alone, and in their dtypes.
    """
    total = wide(torch.cat(list(tensors), dim=-1))
    dist.all_reduce(total, group=group)
    return torch.split(total, [each.shape[-1] for each in tensors], dim=-1)


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """The two chunks of a rank: one of the head and one of the tail of the sequence.

    Under a causal mask late chunks see much and early ones little; every such pair sees the same.
    """
    return rank, 2 * ranks - 1 - rank


def wide(tensor: Tensor) -> Tensor:
    """The tensor in float32, or in its own dtype where that is wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, dim: int, group: dist.ProcessGroup | None) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _all_gather(shard, dim, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _reduce_scatter(wide(grad), ctx.dim, ctx.group).to(grad.dtype), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, dim: int, group: dist.ProcessGroup | None, *wholes: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.dim, ctx.group = dim, group
        ctx.dtypes = [each.dtype for each in wholes]
        total = _reduce_scatter(wide(_side_by_side(wholes)), dim, group)
        return torch.split(total, [each.shape[-1] for each in wholes], dim=-1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Nothing is added here: as bytes, each gradient keeps its own dtype.
        sent = [
            grad.to(dtype).contiguous().view(torch.uint8)
            for grad, dtype in zip(grads, ctx.dtypes, strict=True)
        ]
        received = _all_gather(_side_by_side(sent), ctx.dim, ctx.group)
        pieces = torch.split(received, [each.shape[-1] for each in sent], dim=-1)
        found = (
            piece.contiguous().view(dtype) for piece, dtype in zip(pieces, ctx.dtypes, strict=True)
        )
        return None, None, *found


def _side_by_side(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor [..., all w] in the widest of the dtypes; of a single one no copy."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim=-1)


def _all_gather(shard: Tensor, dim: int, group: dist.ProcessGroup | None) -> Tensor:
    ranks = dist.get_world_size(group)
    # Chunks come first on the wire, so that one copy on either side puts them in place.
    sent = torch.stack(shard.chunk(2, dim))
    received = sent.new_empty((2 * ranks, *sent.shape[1:]))
    # torch 2.13 renames the collective and deprecates the old name.
    if hasattr(dist, "all_gather_single"):
        dist.all_gather_single(received, sent, group=group)
    else:
        dist.all_gather_into_tensor(received, sent, group=group)
    parts = dict(zip(_order(ranks), received, strict=True))
    return torch.cat([parts[chunk] for chunk in range(2 * ranks)], dim)


def _reduce_scatter(whole: Tensor, dim: int, group: dist.ProcessGroup | None) -> Tensor:
    ranks = dist.get_world_size(group)
    chunks = whole.chunk(2 * ranks, dim)
    sent = torch.stack([chunks[chunk] for chunk in _order(ranks)])
    received = sent.new_empty((2, *sent.shape[1:]))
    if hasattr(dist, "reduce_scatter_single"):
        dist.reduce_scatter_single(received, sent, group=group)
    else:
        dist.reduce_scatter_tensor(received, sent, group=group)
    return torch.cat(received.unbind(), dim)


def _order(ranks: int) -> list[int]:
    """All chunks, rank by rank."""
    return [chunk for rank in range(ranks) for chunk in chunks_of(rank, ranks)]
