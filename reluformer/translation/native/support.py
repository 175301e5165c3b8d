"""Whether the native library can run a model and is built."""

from reluformer.model import ModelConfig
from reluformer.model.config import AttentionConfig
from reluformer.ops.backends.cpu.native import library
from reluformer.ops.family.table import lookup
from reluformer.translation.native.layout import declare

MEMORY_POWERS = {"relu": 1, "squared_relu": 2, "softmax": 0, "softmax_ln": 0}
"""Powers of the supported memories; 0 is softmax."""

NOT_BUILT = "it is not built (python -m reluformer.ops.backends.cpu.native builds it)"


def load() -> library.Kernels | None:
    """The native library with declared functions, or None if it is not built."""
    kernels = library.load()
    if kernels is not None:
        declare(kernels.library)
    return kernels


def why_not(config: ModelConfig) -> str | None:
    """Reason why the native library cannot run models of `config` here; None if it can."""
    for site in ("encoder", "decoder", "cross"):
        reason = _attention_reason(config.attention_at(site))
        if reason is not None:
            return reason
    if config.memory not in MEMORY_POWERS:
        return f"it has no {config.memory} memory"
    if load() is None:
        return NOT_BUILT
    return None


def _attention_reason(config: AttentionConfig) -> str | None:
    """Reason why an attention is not supported."""
    row = lookup(config.kind)
    if config.kind == "softmax":
        return None
    rule = row.rectified(config.fixed_options)
    if rule is None or row.cosine or row.output_transform is not None:
        return f"it has no {config.kind} attention"
    if rule.negative_slope > 0:
        return f"it has no {config.kind} attention with a negative slope"
    return None
