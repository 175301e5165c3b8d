"""Attention without softmax in models of transformers: `attn_implementation="relu"`."""

from reluformer.hf.learned_options import prepare
from reluformer.hf.registration import register

__all__ = ["prepare", "register"]

register()
