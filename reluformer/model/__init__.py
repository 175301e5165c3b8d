"""Models: ReLUFormer and ReLUFormerLM, their memories, attentions and losses."""

from reluformer.model.config import AttentionConfig, ModelConfig
from reluformer.model.language import ReLUFormerLM
from reluformer.model.memory import KeyValueMemory
from reluformer.model.transformer import ReLUFormer

__all__ = ["AttentionConfig", "KeyValueMemory", "ModelConfig", "ReLUFormer", "ReLUFormerLM"]
