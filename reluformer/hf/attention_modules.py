"""The attention modules of a transformers model, and what they say about themselves."""

import re
import warnings
from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from reluformer.errors import UserError
from reluformer.nn.multihead import MultiheadAttention
from reluformer.nn.replace import LOOKS_LIKE_ATTENTION
from reluformer.nn.sdpa import count_calls, first_size, source_of

_HEADS = ("num_heads", "n_heads", "num_attention_heads")
_WIDTHS = ("qk_head_dim", "head_dim", "attention_head_size", "key_value_proj_dim", "head_size")
# Names of cross-attentions: BART's, BERT's, T5's.
_CROSS = re.compile(r"cross|encoder_attn|EncDec", re.IGNORECASE)


def submodels(model: nn.Module) -> Iterator[PreTrainedModel]:
    """The transformers models inside a module, the module itself first; each has a config."""
    return (module for module in model.modules() if isinstance(module, PreTrainedModel))


def attention_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules that call transformers' attention interface."""
    for name, module in model.named_modules():
        if _calls_interface(type(module)) and isinstance(
            getattr(module, "config", None), PreTrainedConfig
        ):
            yield name, module


def _calls_interface(kind: type[nn.Module]) -> bool:
    """Whether `forward` of a class looks up `config._attn_implementation`."""
    return "ALL_ATTENTION_FUNCTIONS" in (source_of(kind.forward) or "")


def ignored_error(model: type[nn.Module], kind: str) -> UserError:
    """The error of a class of models whose attention cannot be replaced."""
    return UserError(
        f"attn_implementation={kind!r} is not possible for {model.__name__}: it does not use "
        "transformers' attention interface, so its attention cannot be replaced"
    )


def ignores_interface(model: nn.Module) -> bool:
    """Whether a model has attentions, and none of them calls transformers' attention interface."""
    kinds = (type(module).__name__ for module in model.modules())
    return any(map(LOOKS_LIKE_ATTENTION.search, kinds)) and not any(attention_modules(model))


def knows_causality(model: PreTrainedModel) -> bool:
    """Whether the attribute `is_causal` of the attention modules of a model can be relied on."""
    flags = {getattr(module, "is_causal", None) for _, module in attention_modules(model)}
    has_decoder = model.config.is_encoder_decoder or getattr(model.config, "is_decoder", False)
    return model._supports_sdpa and None not in flags and (True in flags or not has_decoder)


def left_at_softmax(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules that run torch's attention, which a configuration does not reach."""
    for name, module in model.named_modules():
        calls = count_calls(type(module)) and not _calls_interface(type(module))
        if calls or isinstance(module, nn.MultiheadAttention):
            yield name, module


def warn_of_softmax(model: nn.Module, kind: str) -> None:
    """Warn of modules that keep torch's attention."""
    for name, module in left_at_softmax(model):
        if isinstance(module, MultiheadAttention):
            continue
        is_torch = isinstance(module, nn.MultiheadAttention)
        owner = model.get_submodule(name.rpartition(".")[0]) if is_torch else module
        warnings.warn(
            f"attn_implementation={kind!r} leaves the attention of torch in "
            f"{type(owner).__name__} at softmax",
            stacklevel=2,
        )


def head_sizes(name: str, module: nn.Module, kind: str) -> tuple[int, int, int | None]:
    """Number of heads of a module, their width, and the width of values if it differs."""
    config = module.config
    heads = first_size(module, _HEADS) or getattr(config, "num_attention_heads", None)
    hidden = getattr(config, "hidden_size", None)
    width = first_size(module, _WIDTHS) or (hidden // heads if heads and hidden else None)
    if heads is None or width is None:
        raise UserError(
            f"attn_implementation={kind!r} needs the number and the width of heads, and "
            f"{name or 'the model'} ({type(module).__name__}) has neither "
            f"{', '.join(_HEADS)} nor {', '.join(_WIDTHS)}"
        )
    return heads, width, first_size(module, ("v_head_dim",))


def is_cross_attention(name: str) -> bool:
    """Whether an attention module with this path reads the keys of another sequence."""
    return _CROSS.search(name) is not None
