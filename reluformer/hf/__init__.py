"""Attention without softmax in models of transformers: `attn_implementation="normalised_relu"`."""

from reluformer.hf.layers import Replacement, prepare, replace_attention_modules
from reluformer.hf.registration import register
from reluformer.hf.trainer_callback import ReLUAttentionCallback

__all__ = [
    "ReLUAttentionCallback",
    "Replacement",
    "prepare",
    "register",
    "replace_attention_modules",
]

register()
