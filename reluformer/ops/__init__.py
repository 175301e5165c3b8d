"""Operations: what an attention computes, and the implementations that compute it."""

from reluformer.ops.api import attention, relu_attention
from reluformer.ops.call import AttentionResult
from reluformer.ops.family.table import ATTENTIONS
from reluformer.ops.paged_cache import PagedCache, decode_attention
from reluformer.ops.stats import RowSums, Stats

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
