"""Attention without softmax: ReLUFormer, its relatives, and document translation."""

from reluformer.errors import UserError
from reluformer.model import AttentionConfig, KeyValueMemory, ModelConfig, ReLUFormer, ReLUFormerLM
from reluformer.ops import ATTENTIONS, AttentionResult, Stats, attention, relu_attention

__version__ = "0.1.0"

__all__ = [
    "ATTENTIONS",
    "AttentionConfig",
    "AttentionResult",
    "KeyValueMemory",
    "ModelConfig",
    "ReLUFormer",
    "ReLUFormerLM",
    "Stats",
    "UserError",
    "__version__",
    "attention",
    "relu_attention",
]
