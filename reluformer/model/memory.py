"""The global key-value memory: the feed-forward layer as an attention to learned slots."""

from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from reluformer.errors import UserError
from reluformer.model.memories.definition import Query, Size, Table
from reluformer.model.memories.persistent import extend
from reluformer.model.memories.table import MEMORIES, Memory, lookup

__all__ = ["MEMORIES", "KeyValueMemory", "Memory", "MemoryResult"]


class MemoryResult(NamedTuple):
    """What was read, and with which weights."""

    output: Tensor
    """[..., width]."""
    weights: Tensor
    """[..., slots], before dropout; [..., heads, slots] for a persistent memory.

    Product-key heads share their values, so their weights are added. Weights times values is the
    output before bias and norm.
    """


class KeyValueMemory(nn.Module):
    """weights(x K^T) V with keys and values that are learned: x [..., width] to [..., width].

    Attention computes the same `reluformer.ops.memory.read` with keys and values from other tokens;
    here n, the number of keys a row sees, is `slots`, and scores are not divided by sqrt(width)
    (a persistent memory, which joins an attention, divides by that of a head).

    width    width of x, of the keys and of the values
    slots    number of key-value pairs: the hidden size of a feed-forward layer
    kind     a name in `MEMORIES`
    bias     add `keys_bias` [slots] to the scores and `values_bias` [width] to what is read; a gate
             has its own; not for kinds with heads
    dropout  dropout on the weights while training
    heads    read heads, for product-key and persistent memories only

    Further keywords are the options of the kind: k and rank_by_value (top_k), k (product keys),
    experts, k and expert_dropout (sigma_moe). k may not exceed what there is to choose from.

    Parameters, with w the width and n the slots: 2 w n; 3 w n for reglu and swiglu; 2 w more for
    softmax_ln; w experts more for sigma_moe; heads (w^2 + w sqrt(n)) + w n for product keys. They
    start normal, keys with deviation w^-1/2 so that unit-variance x gives unit-variance scores.
    Values start with n^-1/2, and a ReLU memory's output has variance 1/2; with 1 in kinds whose
    weights sum to 1, see `Memory.unit_values`. Selectors note where they differ.
    """

    keys: Tensor
    values: Tensor
    values_bias: Tensor

    def __init__(
        self,
        width: int,
        slots: int,
        kind: str = "relu",
        *,
        bias: bool = False,
        dropout: float = 0.0,
        heads: int = 1,
        **options: Any,
    ) -> None:
        super().__init__()
        self.spec = lookup(kind)
        for name, number in (("width", width), ("slots", slots), ("heads", heads)):
            if not isinstance(number, int) or number < 1:
                raise UserError(f"{name} must be an integer of at least 1, got {number!r}")
        if not 0 <= dropout < 1:
            raise UserError(f"dropout must be in [0, 1), got {dropout}")
        self.selector = self.spec.select_with(options)
        if heads > 1 and not self.selector.by_head:
            raise UserError(f"heads must be 1 for a {kind} memory, got {heads}")
        if bias and self.selector.by_head:
            raise UserError(f"bias must be False for a {kind} memory, got {bias}")
        self.size = Size(width, slots, heads)
        self.selector.check(self.size)
        self.kind, self.bias, self.dropout = kind, bias, dropout
        self.tables = self._tables()
        for name, table in self.tables.items():
            self.register_parameter(name, nn.Parameter(torch.empty(table.shape)))
        self.finish = None if self.spec.finish is None else self.spec.finish(width)
        self.reset_parameters()

    @property
    def width(self) -> int:
        """Width of x, of the keys and of the values."""
        return self.size.width

    @property
    def slots(self) -> int:
        """Number of key-value pairs."""
        return self.size.slots

    def reset_parameters(self) -> None:
        """Draw new keys and values; biases start at 0."""
        with torch.no_grad():
            for name, table in self.tables.items():
                parameter = self.get_parameter(name).normal_(std=table.deviation)
                if table.unit_rows:
                    parameter.div_(parameter.norm(dim=-1, keepdim=True))
        if self.finish is not None:
            self.finish.reset_parameters()

    def forward(self, x: Tensor, return_weights: bool = False) -> Tensor | MemoryResult:
        """Read the memory with x [..., width]: a tensor [..., width], or a result with weights."""
        output, weights = self.selector.read(self._query(x, return_weights))
        if self.bias:
            output = output + self.values_bias
        if self.finish is not None:
            output = self.finish(output)
        output = output.reshape(x.shape)
        if not return_weights:
            return output
        assert weights is not None
        return MemoryResult(output, weights.reshape(*x.shape[:-1], *weights.shape[1:]))

    def penalty(self, x: Tensor) -> Tensor:
        """What a training loss may add for the queries x, a scalar; 0 for most kinds.

        For sigma_moe the negative entropy of the mean choice of experts: a small multiple of it
        keeps all experts in use.
        """
        return self.selector.penalty(self._query(x))

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a context with this persistent memory in front, for an attention.

        k and v [B, Hkv, T, D], D = width / heads and Hkv a divisor of heads; the result is
        [B, heads, slots + T, D]. An attention to it has one softmax over slots and context. Causal
        rows see all the slots, for causal masks are aligned to the end. Add `slots` to
        `key_lengths`; put `slots` visible columns in front of a mask. Rotate keys before this, as
        slots have no position.
        """
        if self.kind != "persistent":
            raise UserError(f"only a persistent memory extends an attention, this is {self.kind!r}")
        return extend(self.keys, self.values, k, v)

    def extra_repr(self) -> str:
        """Sizes and options."""
        shown: dict[str, Any] = {"width": self.width, "slots": self.slots, "kind": self.kind}
        if self.bias:
            shown["bias"] = True
        if self.dropout:
            shown["dropout"] = self.dropout
        if self.selector.by_head:
            shown["heads"] = self.size.heads
        shown.update(asdict(self.selector))
        return ", ".join(f"{name}={value}" for name, value in shown.items())

    def _tables(self) -> dict[str, Table]:
        """The selector's tables, with the gate, the biases and the start that the kind asks for."""
        tables = self.selector.tables(self.size)
        if self.spec.unit_values:
            tables["values"] = replace(tables["values"], deviation=1.0)
        if self.spec.gate:
            tables["gate"] = tables["keys"]
        if self.bias:
            for name in ("keys", "gate"):
                if name in tables:
                    tables[f"{name}_bias"] = Table((self.slots,))
            tables["values_bias"] = Table((self.width,))
        return tables

    def _query(self, x: Tensor, want_weights: bool = False) -> Query:
        if x.dim() == 0 or x.shape[-1] != self.width:
            raise UserError(f"x must be [..., {self.width}], got shape {list(x.shape)}")
        own = self.values.dtype
        if x.dtype != own and not (x.is_floating_point() and _autocasts(x)):
            raise UserError(f"x must have the memory's dtype {own}, got {x.dtype}")
        return Query(
            x.reshape(-1, self.width),
            {name: getattr(self, name) for name in self.tables},
            self.spec.weights,
            dropout_p=self.dropout if self.training else 0.0,
            training=self.training,
            want_weights=want_weights,
        )


def _autocasts(x: Tensor) -> bool:
    return torch.is_autocast_enabled(x.device.type)
