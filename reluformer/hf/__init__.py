"""Attention without softmax in models of transformers: `attn_implementation="normalised_relu"`."""

from reluformer.hf.configuration import ReLUFormerConfig
from reluformer.hf.export import export_run, to_transformers
from reluformer.hf.layers import Replacement, prepare, replace_attention_modules
from reluformer.hf.models import ReLUFormerForCausalLM, ReLUFormerForConditionalGeneration
from reluformer.hf.registration import register
from reluformer.hf.trainer_callback import ReLUAttentionCallback

__all__ = [
    "ReLUAttentionCallback",
    "ReLUFormerConfig",
    "ReLUFormerForCausalLM",
    "ReLUFormerForConditionalGeneration",
    "Replacement",
    "export_run",
    "prepare",
    "register",
    "replace_attention_modules",
    "to_transformers",
]

register()
