"""Decoding from a cache that is divided over ranks: one sum of [B, H, Tq, Dv] for each step.

With `row_normalise` that sum has one column more, of row sums.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from reluformer.context_parallel import partial_sums
from reluformer.context_parallel.collectives import add_up
from reluformer.context_parallel.sharding import ShardedSequence, check_group
from reluformer.errors import UserError
from reluformer.ops.backends.fused import with_cosines
from reluformer.ops.growing_buffer import append_slots
from reluformer.ops.visibility import Visibility


class ShardedCache:
    """Keys and values of one attention's tokens, each on one rank of a group (None: of all).

    All ranks call the same methods with the same tokens, and each stores only those whose turn it
    is: a token goes to the rank that holds fewest, the first of them. All sentences of a batch have
    the same length. For decoding: nothing here has a gradient.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        check_group(group)
        self.group, self.rank = group, dist.get_rank(group)
        self.loads = [0] * dist.get_world_size(group)
        """Tokens on each rank."""
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._positions = torch.empty(0, dtype=torch.int64)

    @property
    def length(self) -> int:
        """Tokens on all ranks."""
        return sum(self.loads)

    @torch.no_grad()
    def fill(self, k: Tensor, v: Tensor, sequence: ShardedSequence) -> None:
        """Take over a prompt's shards k and v [B, Hkv, 2c, .] where they are; nothing is sent."""
        sequence.check(k, 2, "k")
        if self.length:
            raise UserError(f"only an empty cache can be filled, and this one holds {self.length}")
        end = torch.tensor(sequence.length)
        self.loads = [int(sequence.held(end, rank)) for rank in range(sequence.ranks)]
        own = slice(self.loads[self.rank])
        self._store(k[:, :, own], v[:, :, own], sequence.positions(k.device)[own])

    @torch.no_grad()
    def append(self, k: Tensor, v: Tensor) -> None:
        """Add the next tokens' k and v [B, Hkv, t, .], the same on all ranks; nothing is sent."""
        first, own = self.length, []
        for token in range(k.shape[2]):
            turn = self.loads.index(min(self.loads))
            self.loads[turn] += 1
            if turn == self.rank:
                own.append(token)
        tokens = torch.tensor(own, dtype=torch.int64, device=k.device)
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
        """The output [B, H, Tq, Dv], on all ranks, of the last Tq tokens' queries [B, H, Tq, D].

        q is the same on all ranks, and its tokens are appended already. Each row sees its own token
        and all before it. The other arguments are those of `reluformer.attention`.
        """
        row = partial_sums.additive(name)
        if self._keys is None or self._values is None or not 0 < q.shape[2] <= self.length:
            raise UserError(
                f"q must hold queries [B, H, Tq, D] of the last Tq of the {self.length} tokens in "
                f"the cache, got shape {list(q.shape)}"
            )
        stored = len(self._positions)
        call = partial_sums.checked_call(
            row, q, self._keys[:, :, :stored], self._values[:, :, :stored], options, scale=scale
        )
        position = torch.arange(self.length - q.shape[2], self.length, device=q.device)
        mask = None
        if q.shape[2] > 1:
            # One new token sees all; of several, the first do not see the last.
            mask = self._positions <= position.unsqueeze(-1)
        call = with_cosines(row, call)._replace(visibility=Visibility(mask=mask))
        sums = add_up(partial_sums.read(partial_sums.rule_of(row, options), call, impl), self.group)
        return partial_sums.combine(row, options, sums, position.view(1, 1, -1) + 1, q.dtype)

    def _store(self, k: Tensor, v: Tensor, positions: Tensor) -> None:
        stored = len(self._positions)
        self._keys = append_slots(self._keys, stored, k)
        self._values = append_slots(self._values, stored, v)
        self._positions = torch.cat([self._positions.to(positions), positions])
