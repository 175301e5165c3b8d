"""Our attentions as functions of `transformers.AttentionInterface`."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.utils.output_capturing import _active_collector

from reluformer.errors import UserError
from reluformer.hf.layers import ATTRIBUTE, LayerAttention
from reluformer.hf.masks import CompactMask, same_segment
from reluformer.nn.masks import MaskSizes, from_sdpa
from reluformer.ops.visibility import Visibility

_REFUSED = {"softcap": "scores without a soft cap", "s_aux": "an attention without sinks"}


class _Masked(NamedTuple):
    """The mask of a call in our terms."""

    visibility: Visibility
    bias: Tensor | None
    keys: int
    """Number of keys before the unused part of a static cache."""
    queries: Tensor | None = None
    """Bool [B, Tq], False for padding; None if unknown."""


def attend_module(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend with the signature that transformers prescribes.

    Args:
        module: The attention module; its submodule `reluformer` is the attention.
        query: [B, H, Tq, D].
        key: [B, Hkv, Tk, D].
        value: [B, Hkv, Tk, Dv].
        attention_mask: `CompactMask`, bool mask (True = visible) or additive mask [B, 1, Tq, Tk].
        dropout: Dropout rate of the weights.
        scaling: Factor on the scores; None is the attention's default.
        **kwargs: Of these, `is_causal`, `sliding_window`, `position_bias` and `output_attentions`
            are used.

    Returns:
        The output [B, Tq, H, Dv], and the weights [B, H, Tq, Tk] if the model returns attentions.

    Raises:
        UserError: If the module lacks the submodule, or has a soft cap or sinks.
    """
    layer = _layer(module, kwargs)
    scale = None if scaling is None else layer.adapted_scale(scaling)
    with_weights = _returns_weights(kwargs)
    if (
        isinstance(attention_mask, CompactMask)
        and attention_mask.is_packed
        and layer.takes_packed
        and not (with_weights or kwargs.get("position_bias") is not None)
    ):
        return _attend_packed(layer, (query, key, value), attention_mask, scale, dropout), None
    visibility, bias, keys, queries = _resolve_mask(
        module, layer.is_cross, (query, key), attention_mask, kwargs
    )
    unused = key.shape[2] - keys
    if unused:
        key, value = key[:, :, :keys], value[:, :, :keys]
    output, weights = layer(
        query,
        key,
        value,
        mask=visibility.mask,
        causal=visibility.causal,
        key_lengths=visibility.key_lengths,
        window=visibility.window,
        bias=bias,
        scale=scale,
        dropout_p=dropout,
        gate=layer.take_gate(),
        query_mask=queries,
        need_weights=with_weights,
    )
    if weights is not None and unused:
        weights = functional.pad(weights, (0, unused))
    return output.transpose(1, 2).contiguous(), weights


def _attend_packed(
    layer: LayerAttention,
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: CompactMask,
    scale: float | None,
    dropout: float,
) -> Tensor:
    """Causal attention within packed sequences, [B, T, H, Dv], by the packed kernel."""
    batch, _, rows, _ = tensors[0].shape
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in tensors)  # [B T, heads, D]
    ends, longest = mask.boundaries()
    window = mask.visibility.window
    output = layer.packed(
        q,
        k,
        v,
        ends,
        ends,
        longest,
        longest,
        causal=mask.visibility.causal,
        window=window,
        scale=scale,
        dropout_p=dropout,
    )
    return output.reshape(batch, rows, *output.shape[1:])


def _layer(module: nn.Module, kwargs: dict[str, Any]) -> LayerAttention:
    """The attention of a module, if it can run a call with these arguments."""
    # It may be wrapped, for example by PEFT.
    layer: LayerAttention | None = getattr(module, ATTRIBUTE, None)
    if layer is None:
        raise UserError(
            f"{type(module).__name__} has no attention of reluformer; call "
            "reluformer.hf.prepare(model) after attn_implementation was set"
        )
    for name, need in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise UserError(
                f"attn_implementation={layer.row.name!r} needs {need}, and "
                f"{type(module).__name__} passes {name}"
            )
    return layer


def _returns_weights(kwargs: dict[str, Any]) -> bool:
    """Whether the model returns attention maps in this forward pass."""
    if kwargs.get("output_attentions"):
        return True
    # Some models do not hand the argument on, and collect maps with hooks.
    is_compiling = torch.compiler.is_compiling()
    collected = _active_collector.global_var if is_compiling else _active_collector.get()
    return collected is not None and any("attentions" in name for name in collected)


def _resolve_mask(
    module: nn.Module,
    is_cross: bool,
    tensors: tuple[Tensor, Tensor],
    mask: Tensor | None,
    kwargs: dict[str, Any],
) -> _Masked:
    """Translate the mask of transformers."""
    rows, keys = (tensor.shape[2] for tensor in tensors)
    bias = kwargs.get("position_bias")
    if mask is None:
        is_causal = kwargs.get("is_causal")
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        window = kwargs.get("sliding_window")
        window = window if is_causal and window is not None and keys > window else None
        return _Masked(Visibility(causal=bool(is_causal) and rows > 1, window=window), bias, keys)
    if isinstance(mask, CompactMask):
        bias = None if bias is None else bias[..., : mask.keys]
        visibility = mask.visibility
        if mask.segments is not None:
            same = same_segment(mask.segments)
            hidden = same if visibility.mask is None else visibility.mask & same
            visibility = replace(visibility, mask=hidden)
        return _Masked(visibility, bias, mask.keys, mask.queries(is_cross))
    if mask.shape[-1] > keys:
        mask = mask[..., :keys]
    # In additive masks, large negative values hide keys, and others are a bias.
    batch, heads = tensors[0].shape[:2]
    found = from_sdpa(mask, False, MaskSizes(batch, heads, rows, keys))
    if found.bias is not None:
        bias = found.bias if bias is None else bias + found.bias
    return _Masked(Visibility(found.mask, found.causal), bias, keys)
