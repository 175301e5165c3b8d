"""Sharding of a sequence across the ranks of a process group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from reluformer.context_parallel.collectives import chunks_of, gather
from reluformer.errors import UserError, quote


@dataclass(frozen=True)
class ShardedSequence:
    """A sequence of `length` tokens, sharded across the R ranks of a process group.

    The sequence is padded at its end and cut into 2R chunks of c tokens. The shard of rank r
    consists of chunks r and 2R - 1 - r, which gives all ranks the same work under a causal mask.
    Padding is never visible as a key. Outputs of padded queries have no meaning.

    Args:
        length: Number of tokens of the whole sequence.
        group: The process group; None for all processes.
    """

    length: int
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if type(self.length) is not int or self.length < 1:
            raise UserError(f"length must be an integer of at least 1, got {self.length!r}")
        check_group(self.group)

    @property
    def rank(self) -> int:
        """Rank of this process in the group."""
        return dist.get_rank(self.group)

    @property
    def ranks(self) -> int:
        """R, the number of ranks."""
        return dist.get_world_size(self.group)

    @property
    def chunk(self) -> int:
        """c, the number of tokens of a chunk."""
        return -(-self.length // (2 * self.ranks))

    @property
    def chunks(self) -> tuple[int, int]:
        """Indices of the two chunks of this rank."""
        return chunks_of(self.rank, self.ranks)

    @property
    def shard_length(self) -> int:
        """2c, the number of tokens of a shard, with padding."""
        return 2 * self.chunk

    @property
    def padded_length(self) -> int:
        """2Rc, the number of tokens of all shards, with padding."""
        return self.ranks * self.shard_length

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """Positions [2c] of this rank's tokens in the sequence; padding has positions >= length."""
        within = torch.arange(self.chunk, device=device)
        return torch.cat([chunk * self.chunk + within for chunk in self.chunks])

    def held(self, lengths: Tensor, rank: int | None = None) -> Tensor:
        """Number of tokens before position `lengths` that a rank holds; by default this rank.

        A shard keeps its tokens in order, so these are its first tokens.
        """
        chunks = self.chunks if rank is None else chunks_of(rank, self.ranks)
        head, tail = ((lengths - chunk * self.chunk).clamp(0, self.chunk) for chunk in chunks)
        return head + tail

    def shard(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's shard [..., 2c, ...] of a tensor [..., length, ...], padded with zeros.

        The gradient of `whole` is zero outside the shard.
        """
        if _size(whole, dim) != self.length:
            raise UserError(
                f"whole must have the {self.length} tokens of the sequence in dimension {dim}, "
                f"got {_kind(whole)}"
            )
        dim %= whole.dim()
        padding = [0, 0] * (whole.dim() - dim)
        padding[-1] = self.padded_length - self.length
        chunks = functional.pad(whole, padding).chunk(2 * self.ranks, dim)
        return torch.cat([chunks[chunk] for chunk in self.chunks], dim)

    def unshard(self, shard: Tensor, dim: int) -> Tensor:
        """The whole tensor [..., length, ...] on every rank, from shards [..., 2c, ...].

        Gradients are summed over the ranks: a loss that every rank computes counts R times.
        """
        self.check(shard, dim, "shard")
        dim %= shard.dim()
        return gather(shard, dim, self.group).narrow(dim, 0, self.length)

    def check(self, shard: Tensor, dim: int, name: str) -> None:
        """Raise UserError if a tensor does not have the size of a shard of this sequence."""
        if _size(shard, dim) != self.shard_length:
            raise UserError(
                f"{name} must hold this rank's {self.shard_length} tokens in dimension {dim} "
                f"({self.length} tokens, padded to {self.padded_length}, on {self.ranks} ranks), "
                f"got {_kind(shard)}"
            )


def check_sequence(name: str, value: object) -> None:
    """Raise UserError if an argument is no `ShardedSequence`."""
    if not isinstance(value, ShardedSequence):
        raise UserError(f"{name} must be a ShardedSequence, got {type(value).__name__}")


def _size(tensor: object, dim: int) -> int | None:
    """Size of a dimension; None for other values than tensors and for missing dimensions."""
    if not isinstance(tensor, Tensor) or not -tensor.dim() <= dim < tensor.dim():
        return None
    return tensor.shape[dim]


def _kind(value: object) -> str:
    return f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def check_group(group: dist.ProcessGroup | None) -> None:
    """Raise UserError if this process cannot use the group."""
    if not dist.is_available() or not dist.is_initialized():
        raise UserError(
            "there is no process group; call torch.distributed.init_process_group first"
        )
    is_group = group is None or isinstance(group, dist.ProcessGroup)
    if not is_group or dist.get_rank(group) < 0:
        raise UserError(
            f"group must be a process group that this process belongs to, got {quote(group)}"
        )
