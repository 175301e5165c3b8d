"""Attention operations: their definitions and the backends that compute them."""

from reluformer.ops.api import attention, relu_attention
from reluformer.ops.call import AttentionResult
from reluformer.ops.family.table import ATTENTIONS
from reluformer.ops.paged_cache import PagedCache, decode_attention
from reluformer.ops.stats import RowSums, Stats
from reluformer.ops.varlen import relu_attention_varlen

__all__ = [
    "ATTENTIONS",
    "AttentionResult",
    "PagedCache",
    "RowSums",
    "Stats",
    "attention",
    "decode_attention",
    "relu_attention",
    "relu_attention_varlen",
]
