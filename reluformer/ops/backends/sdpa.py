"""Softmax attention through torch's fused kernels, the strongest baseline for comparisons."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from reluformer.ops.call import AttentionResult, Call
from reluformer.ops.definition import Attention

# cuDNN builds a plan for every new shape, which takes up to half a second.
_WITHOUT_PLANS = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def why_not(attention: Attention, call: Call) -> str | None:
    """One clause that says why this call cannot run here, or None if it can."""
    if attention.name != "softmax":
        return "torch's fused kernels compute softmax only"
    if call.return_weights or call.return_stats or call.return_sums:
        return "torch's fused kernels return neither weights nor statistics"
    return None


def run(attention: Attention, call: Call, options: Mapping[str, Any]) -> AttentionResult:
    """`torch.nn.functional.scaled_dot_product_attention` with our masks and empty rows."""
    rows, keys = call.q.shape[2], call.k.shape[2]
    rules = call.visibility
    # torch aligns `is_causal` to the start, this library to the end: equal for square maps only.
    plainly_causal = rules.only_causal and rows == keys and call.bias is None
    visible = None if plainly_causal else rules.table(rows, keys, call.q.device)
    mask, empty = visible, None
    if visible is not None:
        # A row that sees no key would be NaN: it sees all keys, and its output is set to zero.
        empty = ~visible.any(dim=-1, keepdim=True)
        mask = visible | empty
    if call.bias is not None:
        mask = call.bias if mask is None else torch.where(mask, call.bias, -torch.inf)
        mask = mask.to(call.q.dtype)
    if mask is not None:
        # torch takes no mask of fewer than two dimensions.
        mask = mask.expand(*call.q.shape[:3], keys)
    with _kernels(call):
        output = functional.scaled_dot_product_attention(
            call.q,
            call.k,
            call.v,
            attn_mask=mask,
            dropout_p=call.dropout_p,
            is_causal=plainly_causal,
            scale=call.scale,
            enable_gqa=call.groups > 1,
        )
    if empty is not None:
        output = output.masked_fill(empty, 0.0)
    # Under autocast torch returns half precision; the output has q's dtype, as in the reference.
    return AttentionResult(output.to(call.q.dtype), None, None)


def _kernels(call: Call) -> AbstractContextManager[Any]:
    """Context that leaves out cuDNN during generation, where the KV length changes every step."""
    if call.q.is_cuda and torch.is_inference_mode_enabled():
        return sdpa_kernel(_WITHOUT_PLANS)
    return nullcontext()
