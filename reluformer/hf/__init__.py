"""Attention without softmax in models of transformers: `attn_implementation="normalised_relu"`."""

from reluformer.hf.layers import Replacement, prepare, replace_attention_modules
from reluformer.hf.registration import register

__all__ = ["Replacement", "prepare", "register", "replace_attention_modules"]

register()
