"""Attention without softmax: ReLUFormer, its relatives, and document translation."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reluformer.errors import UserError
    from reluformer.model import (
        AttentionConfig,
        KeyValueMemory,
        ModelConfig,
        ReLUFormer,
        ReLUFormerLM,
    )
    from reluformer.ops import (
        ATTENTIONS,
        AttentionResult,
        PagedCache,
        RowSums,
        Stats,
        attention,
        decode_attention,
        relu_attention,
        relu_attention_varlen,
    )
    from reluformer.translation.translator import Translator

__version__ = "0.1.0"

__all__ = [
    "ATTENTIONS",
    "AttentionConfig",
    "AttentionResult",
    "KeyValueMemory",
    "ModelConfig",
    "PagedCache",
    "ReLUFormer",
    "ReLUFormerLM",
    "RowSums",
    "Stats",
    "Translator",
    "UserError",
    "__version__",
    "attention",
    "decode_attention",
    "relu_attention",
    "relu_attention_varlen",
]

_MODULES = ("errors", "ops", "model", "translation.translator")


def __getattr__(name: str) -> Any:
    # Names are looked up on first use: the command line answers without loading torch.
    if name in __all__:
        for module in _MODULES:
            found = import_module(f"reluformer.{module}")
            if hasattr(found, name):
                globals()[name] = getattr(found, name)
                return globals()[name]
    raise AttributeError(f"module 'reluformer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
