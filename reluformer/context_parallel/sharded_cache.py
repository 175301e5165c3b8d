"""Decoding from a KV cache that is sharded across ranks.

Each step sums a tensor [B, H, Tq, Dv] over the ranks, with one more column for the row sums if the
attention is row-normalised.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from reluformer.context_parallel import partial_sums
from reluformer.context_parallel.collectives import all_reduce_sum
from reluformer.context_parallel.sharding import ShardedSequence, check_group, check_sequence
from reluformer.errors import UserError
from reluformer.ops.backends.fused import with_cosines
from reluformer.ops.cache_inputs import check_tokens, in_dtype_of
from reluformer.ops.call import Call
from reluformer.ops.checks import check_attention, check_tensors
from reluformer.ops.gate import check_storage, in_autocast_dtype
from reluformer.ops.growing_buffer import append_slots
from reluformer.ops.visibility import Visibility


class ShardedCache:
    """KV cache of one attention; each token is stored on one rank of a process group.

    All ranks call the same methods with the same tokens. A token is stored by the rank with the
    fewest tokens, the lowest of several. All sequences of a batch have the same length. Gradients
    are not supported.

    Args:
        group: The process group; None for all processes.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        check_group(group)
        self.group, self.rank = group, dist.get_rank(group)
        self.loads = [0] * dist.get_world_size(group)
        """Number of tokens on each rank."""
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._positions = torch.empty(0, dtype=torch.int64)

    @property
    def length(self) -> int:
        """Number of tokens on all ranks."""
        return sum(self.loads)

    @torch.no_grad()
    def fill(self, k: Tensor, v: Tensor, sequence: ShardedSequence) -> None:
        """Store the shards k [B, Hkv, 2c, D] and v [B, Hkv, 2c, Dv] of a prompt.

        Raises:
            UserError: If the cache is not empty.
        """
        check_sequence("sequence", sequence)
        check_tokens({"k": k, "v": v}, None)
        sequence.check(k, 2, "k")
        if self.length:
            raise UserError(
                f"the cache must be empty to be filled, but it holds {self.length} tokens"
            )
        end = torch.tensor(sequence.length)
        self.loads = [int(sequence.held(end, rank)) for rank in range(sequence.ranks)]
        tokens = slice(self.loads[self.rank])
        self._store(k[:, :, tokens], v[:, :, tokens], sequence.positions(k.device)[tokens])

    @torch.no_grad()
    def append(self, k: Tensor, v: Tensor) -> None:
        """Append t tokens, k [B, Hkv, t, D] and v [B, Hkv, t, Dv], equal on all ranks."""
        stored = self._stored()
        if stored is not None:
            k, v = in_dtype_of(stored[0], k), in_dtype_of(stored[0], v)
        check_tokens({"k": k, "v": v}, stored, None if stored is None else stored[0].shape[0])
        first, local = self.length, []
        for token in range(k.shape[2]):
            turn = self.loads.index(min(self.loads))
            self.loads[turn] += 1
            if turn == self.rank:
                local.append(token)
        tokens = torch.tensor(local, dtype=torch.int64, device=k.device)
        self._store(k[:, :, tokens], v[:, :, tokens], first + tokens)

    @torch.no_grad()
    def attend(
        self,
        name: str,
        q: Tensor,
        *,
        scale: float | None = None,
        impl: str = "auto",
        **options: Any,
    ) -> Tensor:
        """Causal attention of the last Tq tokens, which have been appended, to the whole cache.

        Args:
            name: A rectified attention, such as "relu".
            q: [B, H, Tq, D], equal on all ranks.
            scale: Factor of the scores, as in `reluformer.attention`.
            impl: Backend of the local computation, as in `reluformer.attention`.
            **options: Options of the attention.

        Returns:
            [B, H, Tq, Dv], on all ranks.
        """
        row = partial_sums.additive(name)
        k, v = self._keys_for(q)
        q, k, v = in_autocast_dtype(q, k, v)
        check_tensors(q, k, v)
        scale = row.default_scale(q.shape[-1]) if scale is None else scale
        call = Call(q, k, v, Visibility(), scale)
        check_attention(row, call, options)
        position = torch.arange(self.length - q.shape[2], self.length, device=q.device)
        mask = None
        if q.shape[2] > 1:
            # A single new token sees all tokens; of several, each sees those up to its position.
            mask = self._positions <= position.unsqueeze(-1)
        call = with_cosines(row, call)._replace(visibility=Visibility(mask=mask))
        rule = partial_sums.rule_of(row, options)
        sums = all_reduce_sum(partial_sums.sum_over_keys(rule, call, impl), self.group)
        return partial_sums.combine(row, options, sums, position.view(1, 1, -1) + 1, q.dtype)

    def _stored(self) -> tuple[Tensor, Tensor] | None:
        """Keys [B, Hkv, slots, D] and values [.., Dv] of this rank; None in an empty cache."""
        if self._keys is None or self._values is None:
            return None
        slots = len(self._positions)
        return self._keys[:, :, :slots], self._values[:, :, :slots]

    def _keys_for(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of this rank, for queries [B, H, Tq, D] of the last tokens."""
        stored = self._stored()
        if not isinstance(q, Tensor):
            raise UserError(f"q must be a tensor, got {type(q).__name__}")
        check_storage([*([] if stored is None else [("the cache", stored[0])]), ("q", q)])
        if stored is None or q.dim() != 4 or not 0 < q.shape[2] <= self.length:
            raise UserError(
                f"q must be [B, H, Tq, D] with Tq between 1 and the {self.length} tokens in the "
                f"cache, got shape {list(q.shape)}"
            )
        return stored

    def _store(self, k: Tensor, v: Tensor, positions: Tensor) -> None:
        stored = len(self._positions)
        self._keys = append_slots(self._keys, stored, k)
        self._values = append_slots(self._values, stored, v)
        self._positions = torch.cat([self._positions.to(positions), positions])
