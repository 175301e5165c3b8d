"""`torch.nn.MultiheadAttention` with an attention of the family."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from reluformer.errors import UserError
from reluformer.nn.core import RECOMMENDED, AttentionCore
from reluformer.nn.masks import MaskSizes, TorchMask, from_torch, visible_keys


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` with another attention than softmax.

    Signature, shapes, masks and names of parameters are those of torch. Differences:

    - The learned options of the attention are further parameters, see `AttentionCore`.
    - In training, the backward pass adds the gradient of the row loss, see `AttentionCore`.
    - A row that sees no key gives zeros (before the output projection).
    - Returned weights are those before dropout. Their rows need not sum to 1.
    - Finite values of a float mask are added to the scores, for every attention; with such
      values the attention runs on the reference backend. -inf and the smallest finite number hide
      a key.
    - Nested tensors are refused, and torch's fast path, which computes softmax, is never taken.

    Args:
        attention: Name in `reluformer.ATTENTIONS`; the default is `normalised_relu`.
        attention_options: Options of the attention and of `AttentionCore`.

    The other arguments are those of `torch.nn.MultiheadAttention`.

    Raises:
        UserError: If a size, the attention or an option is not allowed.
    """

    core: AttentionCore

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        attention: str = RECOMMENDED,
        attention_options: Mapping[str, Any] | None = None,
    ) -> None:
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise UserError(
                f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}"
            )
        super().__init__(
            embed_dim,
            num_heads,
            dropout,
            bias,
            add_bias_kv,
            add_zero_attn,
            kdim,
            vdim,
            batch_first,
            device,
            dtype,
        )
        self.set_attention(attention, attention_options)

    @classmethod
    def from_torch(
        cls,
        module: nn.MultiheadAttention,
        attention: str = RECOMMENDED,
        attention_options: Mapping[str, Any] | None = None,
    ) -> "MultiheadAttention":
        """Turn a module of torch into this class, in place; its parameters and hooks stay.

        Args:
            module: Instance of `torch.nn.MultiheadAttention` itself or of this class.
            attention: Name in `reluformer.ATTENTIONS`.
            attention_options: Options of the attention and of `AttentionCore`.

        Raises:
            UserError: If the module belongs to another subclass, which may compute something else.
        """
        return plan_conversion(module, attention, attention_options)()

    def set_attention(
        self, attention: str, attention_options: Mapping[str, Any] | None = None
    ) -> None:
        """Replace the attention and its learned options; the projections stay.

        Args:
            attention: Name in `reluformer.ATTENTIONS`.
            attention_options: Options of the attention and of `AttentionCore`.
        """
        self._use(_core(self, attention, attention_options))

    def _use(self, core: AttentionCore) -> None:
        """Install the core, and the projection of its gate if it has one."""
        self.core = core.train(self.training)
        if core.needs_gate:
            weight, width = self.out_proj.weight, self.embed_dim
            self.gate_proj = nn.Linear(width, width, device=weight.device, dtype=weight.dtype)
        elif hasattr(self, "gate_proj"):
            del self.gate_proj
        # torch's encoder layers take their fast path, which computes softmax, only if this is True.
        self._qkv_same_embed_dim = False

    def _reset_parameters(self) -> None:
        self._qkv_same_embed_dim = self.in_proj_weight is not None
        super()._reset_parameters()
        self._qkv_same_embed_dim = False
        if hasattr(self, "core"):
            self.core.reset_parameters()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from query to key and value; arguments and results are those of torch."""
        self._check_inputs(query, key, value)
        if is_causal and attn_mask is None:
            raise UserError("attn_mask must be given with is_causal=True, got None")
        is_batched, is_self = query.dim() == 3, query is key
        q, k, v = self._project(query, key, value, is_batched)
        if not is_batched and key_padding_mask is not None:
            key_padding_mask = key_padding_mask[None]
        sizes = MaskSizes(k.shape[0], self.num_heads, q.shape[2], k.shape[2])
        masks = from_torch(attn_mask, key_padding_mask, is_causal, sizes)
        query_mask = None
        if is_self and key_padding_mask is not None:
            # Padding among the keys of self-attention is padding among the queries.
            query_mask = visible_keys(key_padding_mask)
        k, v, masks = self._extended(k, v, masks, sizes)
        gate = self._split(self.gate_proj(query), is_batched) if self.core.needs_gate else None
        output, weights = self.core(
            q,
            k,
            v,
            **masks._asdict(),
            dropout_p=self.dropout if self.training else 0.0,
            gate=gate,
            query_mask=query_mask,
            need_weights=need_weights,
        )
        output = self.out_proj(self._merged(output, is_batched))
        if not need_weights:
            return output, None
        assert weights is not None
        weights = weights.to(q.dtype)
        if average_attn_weights:
            weights = weights.mean(dim=1)
        return output, weights if is_batched else weights[0]

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Raise a `UserError` for tensors whose shapes do not fit."""
        for name, tensor, width in (
            ("query", query, self.embed_dim),
            ("key", key, self.kdim),
            ("value", value, self.vdim),
        ):
            if tensor.is_nested:
                raise UserError(
                    f"{name} must be a dense tensor, got a nested one; AttentionCore.packed takes "
                    "packed sequences, and replace_attention of a whole encoder keeps it dense"
                )
            if tensor.dim() not in (2, 3) or tensor.dim() != query.dim():
                raise UserError(
                    f"{name} must have 3 dimensions, or 2 if all inputs are unbatched, "
                    f"got shape {tuple(tensor.shape)}"
                )
            if tensor.shape[-1] != width:
                raise UserError(f"{name} must have width {width}, got {tensor.shape[-1]}")
        if key.shape[:-1] != value.shape[:-1]:
            raise UserError(
                f"value must have as many rows as key, got {tuple(value.shape)} and "
                f"{tuple(key.shape)}"
            )
        batch = 0 if self.batch_first else 1
        if query.dim() == 3 and query.shape[batch] != key.shape[batch]:
            raise UserError(
                f"key must have the batch size {query.shape[batch]} of query, "
                f"got {key.shape[batch]}"
            )

    def _project(
        self, query: Tensor, key: Tensor, value: Tensor, is_batched: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, H, Tq, D], k and v [B, H, Tk, D]."""
        packed: Tensor | None = self.in_proj_weight
        if packed is not None and query is key and key is value:
            projected = functional.linear(query, packed, self.in_proj_bias).chunk(3, dim=-1)
        else:
            separate = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            weights = separate if packed is None else packed.chunk(3)
            biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
            inputs = zip((query, key, value), weights, biases, strict=True)
            projected = tuple(functional.linear(*each) for each in inputs)
        q, k, v = (self._split(features, is_batched) for features in projected)
        return q, k, v

    def _extended(
        self, k: Tensor, v: Tensor, masks: TorchMask, sizes: MaskSizes
    ) -> tuple[Tensor, Tensor, TorchMask]:
        """Keys, values and masks with `bias_k`, `bias_v` and the zeros of `add_zero_attn`."""
        extra_k, extra_v = [], []
        shape = (sizes.batch, self.num_heads, 1, self.head_dim)
        if self.bias_k is not None and self.bias_v is not None:
            # Under autocast the keys have another dtype than the parameters.
            extra_k.append(self.bias_k.to(k.dtype).view(1, *shape[1:]).expand(shape))
            extra_v.append(self.bias_v.to(v.dtype).view(1, *shape[1:]).expand(shape))
        if self.add_zero_attn:
            extra_k.append(k.new_zeros(shape))
            extra_v.append(v.new_zeros(shape))
        if not extra_k:
            return k, v, masks
        k, v = torch.cat([k, *extra_k], dim=2), torch.cat([v, *extra_v], dim=2)
        return k, v, masks.extended(len(extra_k), sizes, k.device)

    def _split(self, features: Tensor, is_batched: bool) -> Tensor:
        """Features [B, T, E], [T, B, E] or [T, E] as [B, H, T, D]."""
        heads = features.view(*features.shape[:-1], self.num_heads, self.head_dim)
        if not is_batched:
            heads = heads[None]
        elif not self.batch_first:
            heads = heads.transpose(0, 1)
        return heads.transpose(1, 2)

    def _merged(self, heads: Tensor, is_batched: bool) -> Tensor:
        """Heads [B, H, T, D] as features [B, T, E], [T, B, E] or [T, E]."""
        features = heads.transpose(1, 2).flatten(2)
        if not is_batched:
            return features[0]
        return features if self.batch_first else features.transpose(0, 1)


def plan_conversion(
    module: nn.MultiheadAttention, attention: str, options: Mapping[str, Any] | None
) -> Callable[[], MultiheadAttention]:
    """Find mistakes of `MultiheadAttention.from_torch`; the returned function converts."""
    if type(module) not in (nn.MultiheadAttention, MultiheadAttention):
        raise UserError(
            f"module must be a torch.nn.MultiheadAttention, got {type(module).__name__}"
        )
    core = _core(module, attention, options)

    def convert() -> MultiheadAttention:
        module.__class__ = MultiheadAttention
        assert isinstance(module, MultiheadAttention)
        module._use(core)
        return module

    return convert


def _core(
    module: nn.MultiheadAttention, attention: str, options: Mapping[str, Any] | None
) -> AttentionCore:
    """A core that fits a module of torch."""
    weight = module.out_proj.weight
    return AttentionCore(
        module.num_heads,
        module.head_dim,
        attention,
        options,
        device=weight.device,
        dtype=weight.dtype,
    )
