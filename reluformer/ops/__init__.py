"""Operations: what an attention computes, and the implementations that compute it."""

from reluformer.ops.api import attention, relu_attention
from reluformer.ops.call import AttentionResult
from reluformer.ops.stats import Stats
from reluformer.ops.table import ATTENTIONS

__all__ = ["ATTENTIONS", "AttentionResult", "Stats", "attention", "relu_attention"]
