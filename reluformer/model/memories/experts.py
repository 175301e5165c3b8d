"""sigma-MoE: slots are grouped into experts, and each query reads k experts."""

from dataclasses import dataclass

import torch
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


@dataclass(frozen=True)
class Experts(Selector):
    """Each query reads the k experts with the largest gates sigmoid(x E^T), times the gate.

    A sigmoid lets experts be chosen independently, where a softmax makes them compete.

    Only the chosen experts are computed, in groups whose sizes depend on the data. Under
    torch.compile, or when weights are wanted, all experts are computed and the rest is hidden: the
    same result at the cost of a dense memory.
    """

    experts: int = 16
    """Number of experts; must divide the number of slots."""
    k: int = 4
    """Number of experts that each query reads."""
    expert_dropout: float = 0.0
    """Probability that an expert is unavailable to a query in training."""

    def check(self, size: MemorySize) -> None:
        """Raise UserError unless experts divide the slots and k is at most their number."""
        check_between("experts", self.experts, 1, size.slots, "slots")
        if size.slots % self.experts:
            raise UserError(f"experts must divide slots = {size.slots}, got {self.experts}")
        check_between("k", self.k, 1, self.experts, "experts")
        if not 0 <= self.expert_dropout < 1:
            raise UserError(f"expert_dropout must be in [0, 1), got {self.expert_dropout}")

    def tables(self, size: MemorySize) -> dict[str, Table]:
        """Keys and values as in a dense memory with all slots, and one row of E for each expert.

        The paper prefers this to the scale of a dense memory with the slots of k experts. All rows
        of E start with one length, so that no expert is preferred because of the norm of its row.
        """
        shape = (size.slots, size.width)
        return {
            "keys": Table(shape, size.width**-0.5),
            "values": Table(shape, size.slots**-0.5),
            "experts": Table((self.experts, size.width), size.width**-0.5, unit_rows=True),
        }

    def read(self, query: Query) -> tuple[Tensor, Tensor | None]:
        """The sum over the chosen experts e of sigmoid(x E_e) weights(x K_e^T) V_e."""
        gates, chosen = self._choose(query)
        if query.want_weights or torch.compiler.is_compiling():
            return self._read_all(query, gates, chosen)
        return self._read_chosen(query, gates, chosen), None

    def expert_probabilities(self, query: Query) -> Tensor:
        """softmax(x E^T), [N, experts]."""
        return self._logits(query).softmax(dim=-1)

    def _logits(self, query: Query) -> Tensor:
        logits = query.against("experts")
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _choose(self, query: Query) -> tuple[Tensor, Tensor]:
        """Gates and indices of the k best experts, [N, k] each."""
        gates = self._logits(query).sigmoid()
        if query.training and self.expert_dropout > 0:
            # Gates are positive: a dropped expert ranks last, and weighs 0 if it is still chosen.
            gates = gates.masked_fill(torch.rand_like(gates) < self.expert_dropout, 0.0)
        best = gates.topk(self.k, dim=-1)
        return best.values, best.indices

    def _read_all(self, query: Query, gates: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Computes every expert; a slot is visible where its expert was chosen."""
        scores = query.against("keys")
        slots = scores.shape[-1] // self.experts
        over_experts = gates.new_zeros(len(gates), self.experts)
        visible = over_experts.bool().scatter(-1, chosen, True).repeat_interleave(slots, dim=-1)
        gate = over_experts.scatter(-1, chosen, gates).repeat_interleave(slots, dim=-1)
        return read(
            Scores(hide(scores, visible), visible, query.x.shape[-1]),
            query.tables["values"],
            times(query.weigh, gate),
            query.dropout_p,
        )

    def _read_chosen(self, query: Query, gates: Tensor, chosen: Tensor) -> Tensor:
        """Sorts queries by expert and computes each expert for its queries only."""
        keys, values = (query.tables[name].chunk(self.experts) for name in ("keys", "values"))
        bias = query.tables.get("keys_bias")
        biases = [None] * self.experts if bias is None else bias.chunk(self.experts)
        # Each query appears k times, once in the group of each of its experts.
        order = chosen.flatten().argsort()
        rows = order // self.k
        sizes = torch.bincount(chosen.flatten(), minlength=self.experts).tolist()
        queries = torch.split(query.x[rows], sizes)
        shares = torch.split(gates.flatten()[order].unsqueeze(-1), sizes)

        def read_expert(expert: int) -> Tensor:
            scored = functional.linear(queries[expert], keys[expert], biases[expert])
            scores = Scores(scored, None, query.x.shape[-1])
            weigh = times(query.weigh, shares[expert])
            return read(scores, values[expert], weigh, query.dropout_p)[0]

        parts = torch.cat([read_expert(expert) for expert in range(self.experts)])
        return parts.new_zeros(query.x.shape).index_add(0, rows, parts)
