"""The global key-value memory: a feed-forward layer as attention to learned slots."""

from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from reluformer.errors import UserError
from reluformer.model.memories.definition import MemorySize, Query, Table
from reluformer.model.memories.persistent import extend
from reluformer.model.memories.table import MEMORIES, Memory, lookup

__all__ = ["MEMORIES", "KeyValueMemory", "Memory", "MemoryResult"]


class MemoryResult(NamedTuple):
    """Output of a memory and the weights of its slots."""

    output: Tensor
    """[..., width]."""
    weights: Tensor
    """[..., slots], before dropout; [..., heads, slots] for a persistent memory.

    Product-key heads share their values, so their weights are added. The product of weights and
    values is the output before bias and norm.
    """


class KeyValueMemory(nn.Module):
    """weights(x K^T) V with learned keys and values: x [..., width] to [..., width].

    Attention computes the same `reluformer.ops.memory.read` with keys and values of other tokens.
    Here n, the number of keys that a row sees, is `slots`, and scores are not divided by
    sqrt(width). A persistent memory, which is part of an attention, divides by sqrt(width / heads).

    With width w and n slots, a memory has 2 w n parameters; 3 w n for reglu and swiglu; 2 w more
    for softmax_ln; w * experts more for sigma_moe; heads (w^2 + w sqrt(n)) + w n for product keys.

    Keys and values start normally distributed. Keys have standard deviation w^-1/2, so that
    unit-variance x gives unit-variance scores. Values have n^-1/2, and the output of a ReLU memory
    then has variance 1/2. Softmax memories differ: their values have 1, see `Memory.unit_values`.
    The paper's comparison of ReLU and softmax starts both alike, for which there is `value_std`.

    Args:
        width: Width of x, of the keys and of the values.
        slots: Number of key-value pairs: the hidden size of a feed-forward layer.
        kind: A name in `MEMORIES`.
        bias: Add `keys_bias` [slots] to the scores and `values_bias` [width] to the output; a gate
            has its own bias. Not for kinds with heads.
        dropout: Dropout rate of the weights in training.
        heads: Number of read heads, for product-key and persistent memories only.
        value_std: Standard deviation of the initial values; None takes that of the kind.
        **options: Options of the kind: temperature (kinds that score all slots), k and
            rank_by_value (top_k), k (product keys), experts, k and expert_dropout (sigma_moe).

    Raises:
        UserError: A size or option is unknown or out of range.
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
        value_std: float | None = None,
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
        if value_std is not None and not value_std > 0:
            raise UserError(f"value_std must be greater than 0, got {value_std}")
        self.size = MemorySize(width, slots, heads)
        self.selector.check(self.size)
        self.kind, self.bias, self.dropout, self.value_std = kind, bias, dropout, value_std
        self.tables = self._tables()
        for name, table in self.tables.items():
            self.register_parameter(name, nn.Parameter(torch.empty(table.shape)))
        # Stored models have the parameters of the norm under the name `finish`.
        norm = self.spec.output_norm
        self.finish = None if norm is None else norm(width)
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
        """Draw new keys and values, and set biases to 0."""
        with torch.no_grad():
            for name, table in self.tables.items():
                parameter = self.get_parameter(name).normal_(std=table.deviation)
                if table.unit_rows:
                    parameter.div_(parameter.norm(dim=-1, keepdim=True))
        if self.finish is not None:
            self.finish.reset_parameters()

    def forward(self, x: Tensor, return_weights: bool = False) -> Tensor | MemoryResult:
        """Read the memory.

        Args:
            x: Queries [..., width].
            return_weights: Also return the weights of all slots.

        Returns:
            The output [..., width], or a `MemoryResult` with `return_weights`.
        """
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

    def expert_choices(self, x: Tensor, lengths: Tensor | None = None) -> Tensor | None:
        """Expected number of tokens that choose each expert, for `losses.expert_balance_loss`.

        Args:
            x: Queries [B, T, width].
            lengths: Number of tokens of each row of x that are not padding, [B]; None counts all.

        Returns:
            softmax(x E^T) summed over tokens, [B, experts]; None for kinds without experts.
        """
        probabilities = self.selector.expert_probabilities(self._query(x))
        if probabilities is None:
            return None
        by_token = probabilities.view(*x.shape[:2], probabilities.shape[-1])
        if lengths is not None:
            valid = torch.arange(x.shape[1], device=x.device) < lengths.to(x.device).view(-1, 1)
            by_token = by_token * valid.unsqueeze(-1)
        return by_token.sum(dim=1)

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Prepend the slots of a persistent memory to the context of an attention.

        The attention then has one softmax over slots and context. Causal rows see all slots,
        because causal masks are aligned to the end. Add `slots` to `key_lengths`, and prepend
        `slots` visible columns to a mask. Apply rotary positions before: slots have no position.

        Args:
            k: Keys of the context [B, Hkv, T, D], D = width / heads and Hkv a divisor of heads.
            v: Values of the context [B, Hkv, T, D].

        Returns:
            Keys and values [B, heads, slots + T, D].
        """
        if self.kind != "persistent":
            raise UserError(f"kind must be persistent to extend an attention, got {self.kind!r}")
        return extend(self.keys, self.values, k, v)

    def extra_repr(self) -> str:
        """Sizes and options, for `repr`."""
        shown: dict[str, Any] = {"width": self.width, "slots": self.slots, "kind": self.kind}
        if self.bias:
            shown["bias"] = True
        if self.dropout:
            shown["dropout"] = self.dropout
        if self.value_std is not None:
            shown["value_std"] = self.value_std
        if self.selector.by_head:
            shown["heads"] = self.size.heads
        shown.update(asdict(self.selector))
        return ", ".join(f"{name}={value}" for name, value in shown.items())

    def _tables(self) -> dict[str, Table]:
        """Tables of the selector, with gate and biases, and the initial values of the kind."""
        tables = self.selector.tables(self.size)
        value_std = 1.0 if self.spec.unit_values else None
        if self.value_std is not None:
            value_std = self.value_std
        if value_std is not None:
            tables["values"] = replace(tables["values"], deviation=value_std)
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
