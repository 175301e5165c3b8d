"""Operations: what an attention computes, and the implementations that compute it."""

from reluformer.ops.api import attention, relu_attention
from reluformer.ops.call import AttentionResult
from reluformer.ops.paged import PagedCache, decode_attention
from reluformer.ops.stats import RowSums, Stats
from reluformer.ops.table import ATTENTIONS

__all__ = [
    "ATTENTIONS",
    "AttentionResult",
    "PagedCache",
    "RowSums",
    "Stats",
    "attention",
    "decode_attention",
    "relu_attention",
]
