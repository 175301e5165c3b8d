"""Attention without softmax: ReLUFormer, its relatives, and document translation."""

from reluformer.ops import ATTENTIONS, AttentionResult, Stats, attention, relu_attention

__version__ = "0.1.0"

__all__ = ["ATTENTIONS", "AttentionResult", "Stats", "__version__", "attention", "relu_attention"]
