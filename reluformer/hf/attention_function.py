"""Our attentions as functions of `transformers.AttentionInterface`."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils.output_capturing import _active_collector

from reluformer.errors import UserError
from reluformer.hf.learned_options import ATTRIBUTE, fixed_options, learned_names
from reluformer.hf.masks import CompactMask, same_segment
from reluformer.ops.api import attend, scale_or_default
from reluformer.ops.call import Call
from reluformer.ops.definition import Attention
from reluformer.ops.visibility import Visibility

Function = Callable[..., tuple[Tensor, Tensor | None]]
"""A function of transformers' attention interface."""

_REFUSED = {"softcap": "scores without a soft cap", "s_aux": "no attention sinks"}


class _Masked(NamedTuple):
    """Visibility and bias of a call, and the number of keys that it reads."""

    visibility: Visibility
    bias: Tensor | None
    keys: int


def function_of(attention: Attention) -> Function:
    """The function to register for an attention."""
    return partial(_attend_module, attention)


def _attend_module(
    attention: Attention,
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
        attention: Row of `reluformer.ATTENTIONS`.
        module: The attention module, which holds learned options in its submodule `reluformer`.
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
    """
    for name, need in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise UserError(
                f"attn_implementation={attention.name!r} needs {need}, and "
                f"{type(module).__name__} has {name}={kwargs[name]!r}"
            )
    visibility, bias, keys = _resolve_mask(module, query, key, attention_mask, kwargs)
    if keys < key.shape[2]:
        key, value = key[:, :, :keys], value[:, :, :keys]
    with_weights = _returns_weights(kwargs)
    call = Call(
        query,
        key,
        value,
        visibility,
        _scale(attention, query, scaling),
        bias,
        dropout,
        return_weights=with_weights,
    )
    result = attend(attention, call, _options(attention, module))
    weights = result.weights
    if weights is not None and weights.shape[-1] < attention_keys(attention_mask, weights):
        unused = attention_keys(attention_mask, weights) - weights.shape[-1]
        weights = torch.nn.functional.pad(weights, (0, unused))
    return result.output.transpose(1, 2).contiguous(), weights


def attention_keys(mask: Tensor | None, weights: Tensor) -> int:
    """Tk of the mask, which counts the unused part of a static cache; else that of the weights."""
    return weights.shape[-1] if mask is None else mask.shape[-1]


def _options(attention: Attention, module: nn.Module) -> dict[str, Any]:
    """Fixed options of the configuration and learned options of the module."""
    options = fixed_options(module.config)
    learned = getattr(module, ATTRIBUTE, None)
    if learned is not None and learned.attention == attention.name:
        options.update(learned.values())
    elif any(learned_names(attention, options)):
        raise UserError(
            f"attn_implementation={attention.name!r} needs learned options that "
            f"{type(module).__name__} lacks; call reluformer.hf.prepare(model) first"
        )
    return options


def _scale(attention: Attention, query: Tensor, scaling: float | None) -> float:
    """Factor on the scores. Cosines keep their own; half the width means twice the variance."""
    if scaling is None or attention.cosine:
        return scale_or_default(attention, query, None)
    return scaling * 2**0.5 if attention.halves else scaling


def _returns_weights(kwargs: dict[str, Any]) -> bool:
    """Whether the model returns attention maps in this forward pass."""
    if kwargs.get("output_attentions"):
        return True
    # Some models do not hand the argument on, and collect maps with hooks.
    collected = _active_collector.get()
    return collected is not None and any("attentions" in name for name in collected)


def _resolve_mask(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
) -> _Masked:
    """Translate the mask of transformers."""
    rows, keys = query.shape[2], key.shape[2]
    bias = kwargs.get("position_bias")
    if mask is None:
        is_causal = kwargs.get("is_causal")
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        window = kwargs.get("sliding_window")
        window = window if is_causal and window is not None and keys > window else None
        visibility = Visibility(causal=bool(is_causal) and rows > 1, window=window)
        return _Masked(visibility, bias, keys)
    if isinstance(mask, CompactMask):
        if bias is not None:
            bias = bias[..., : mask.keys]
        visibility = mask.visibility
        if mask.segments is not None:
            visibility = Visibility(
                same_segment(mask.segments),
                visibility.causal,
                visibility.key_lengths,
                visibility.window,
            )
        return _Masked(visibility, bias, mask.keys)
    mask = mask[..., :keys]
    if mask.dtype != torch.bool:
        # Additive: large negative values hide keys, others are a bias.
        visible = mask > torch.finfo(mask.dtype).min / 2
        added = mask.masked_fill(~visible, 0.0)
        bias = added if bias is None else bias + added
        mask = visible
    return _Masked(Visibility(mask), bias, keys)
