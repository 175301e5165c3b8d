"""Attention without softmax: ReLUFormer, its relatives, and document translation."""

from importlib import import_module

# Type checkers take this for true. An import of `typing` would be most of the time in which the
# command line cannot handle an interruption yet.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

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

# Modules that define the public names, lowest layer first. A new public name is added to the
# imports above, for type checkers, and to `__all__`.
_MODULES = ("errors", "ops", "model", "translation.translator")
# Subpackages that are attributes of the package without an import of their own.
_SUBPACKAGES = ("nn",)


def __getattr__(name: str) -> "Any":
    # Names are imported on first use, so that the command line starts without loading torch.
    if name in __all__:
        for module_name in _MODULES:
            module = import_module(f"reluformer.{module_name}")
            if hasattr(module, name):
                globals()[name] = getattr(module, name)
                return globals()[name]
    if name in _SUBPACKAGES:
        return import_module(f"reluformer.{name}")
    raise AttributeError(f"module 'reluformer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
