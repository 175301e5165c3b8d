"""The collectives of context parallelism: `gather` and `scatter_sum` are each other's gradient.

A sequence on R ranks consists of 2R chunks of c tokens. The *shard* of rank r, [..., 2c, ...],
holds chunks r and 2R - 1 - r. `gather` concatenates all shards to the whole sequence. `scatter_sum`
sums whole tensors over the ranks and leaves each rank its shard of the sum. Sums are computed in
float32 or wider; gathered tensors keep their dtype. One collective sums several tensors.
"""

# Builds of torch without distributed support have no `dist.ProcessGroup` to annotate with.
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather(shard: Tensor, dim: int, group: dist.ProcessGroup | None) -> Tensor:
    """Concatenate shards [..., 2c, ...] along `dim` to the whole sequence [..., 2Rc, ...].

    The gradient of a shard is summed over the ranks.
    """
    whole: Tensor = _Gather.apply(shard, dim, group)  # type: ignore[no-untyped-call]
    return whole


def scatter_sum(
    wholes: Sequence[Tensor], dim: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, ...]:
    """Sum tensors [..., 2Rc, ..., w] over the ranks; return this rank's shards [..., 2c, ..., w].

    The tensors may differ in their dtype and in their last dimension, which is not `dim`.
    """
    shards: tuple[Tensor, ...] = _ScatterSum.apply(dim, group, *wholes)  # type: ignore[no-untyped-call]
    return shards


def all_reduce_sum(
    tensors: Sequence[Tensor], group: dist.ProcessGroup | None
) -> tuple[Tensor, ...]:
    """Sum tensors [..., w] over the ranks, without gradients.

    The tensors may differ in their dtype and in their last dimension.
    """
    total = wide(torch.cat(list(tensors), dim=-1))
    dist.all_reduce(total, group=group)
    return torch.split(total, [each.shape[-1] for each in tensors], dim=-1)


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """Indices of the two chunks of a rank, one from each half of the sequence.

    Under a causal mask late chunks see more keys than early ones; all such pairs see equally many.
    """
    return rank, 2 * ranks - 1 - rank


def wide(tensor: Tensor) -> Tensor:
    """The tensor in float32 or, if that is wider, in its own dtype."""
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
        # Gathering needs no arithmetic, so gradients travel as bytes and keep their dtypes.
        sent = [
            grad.to(dtype).contiguous().view(torch.uint8)
            for grad, dtype in zip(grads, ctx.dtypes, strict=True)
        ]
        received = _all_gather(_side_by_side(sent), ctx.dim, ctx.group)
        pieces = torch.split(received, [each.shape[-1] for each in sent], dim=-1)
        wholes = (
            piece.contiguous().view(dtype) for piece, dtype in zip(pieces, ctx.dtypes, strict=True)
        )
        return None, None, *wholes


def _side_by_side(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate along the last dimension, in the widest dtype; a single tensor is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim=-1)


def _all_gather(shard: Tensor, dim: int, group: dist.ProcessGroup | None) -> Tensor:
    ranks = dist.get_world_size(group)
    # Chunks are the first dimension of the message, so that one copy on each side suffices.
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
    """Indices of all chunks, rank by rank."""
    return [chunk for rank in range(ranks) for chunk in chunks_of(rank, ranks)]
