"""The attention of a model in its saved configuration.

transformers does not save `attn_implementation`, so a loaded model would run softmax. It does read
the field, and refuses a name that is not registered.
"""

import functools
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from reluformer.errors import UserError
from reluformer.hf.attention_modules import attention_modules
from reluformer.ops.family.table import ATTENTIONS

PREFIX = "reluformer_"
"""Saved models have this prefix in their `model_type`: without this package none can be loaded."""


def wrap_configurations() -> None:
    """Let saved configurations name the attention and have a `model_type` of their own."""
    for name in ("to_dict", "to_diff_dict"):
        setattr(PreTrainedConfig, name, _with_attention(getattr(PreTrainedConfig, name)))


def _with_attention(method: Any) -> Any:
    """Wrap a method that returns a configuration as a dictionary."""

    @functools.wraps(method)
    def to_dict(self: PreTrainedConfig) -> dict[str, Any]:
        fields: dict[str, Any] = method(self)
        attention = _saved_attention(self)
        model_type = str(fields.get("model_type", ""))
        if attention and model_type and not model_type.startswith("reluformer"):
            fields["model_type"] = PREFIX + model_type
            fields["attn_implementation"] = attention
        return fields

    return to_dict


def _saved_attention(config: PreTrainedConfig) -> str | dict[str, Any] | None:
    """The field `attn_implementation`; None without an attention of ours.

    transformers applies a name to all parts of a configuration, and a dictionary part by part,
    with the configuration itself under "". Parts that it does not name have softmax.
    """
    kind = config._attn_implementation
    own = kind if kind in ATTENTIONS else None
    parts = {name: _saved_attention(part) for name, part in _parts(config)}
    if all(part == own for part in parts.values()):
        return own
    return {name: part for name, part in {"": own, **parts}.items() if part}


def _parts(config: PreTrainedConfig) -> Iterator[tuple[str, PreTrainedConfig]]:
    """Names and configurations of the parts of a composite model."""
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield name, value


def refusing_lost_attentions(save_pretrained: Any) -> Any:
    """Wrap `save_pretrained`: refuse a model whose configuration does not hold its attention."""

    @functools.wraps(save_pretrained)
    def save(self: PreTrainedModel, *arguments: Any, **options: Any) -> Any:
        _check_saved(self)
        return save_pretrained(self, *arguments, **options)

    return save


def _check_saved(model: PreTrainedModel) -> None:
    """Refuse a part with a configuration of its own, such as the encoder of T5, that differs."""
    saved = {(type(c), c._attn_implementation) for c in _all_configurations(model.config)}
    for name, module in attention_modules(model):
        config = module.config
        assert isinstance(config, PreTrainedConfig)
        kind, attention = type(config), config._attn_implementation
        ours = attention if attention in ATTENTIONS else None
        # A configuration that the model makes for a part when it is created is of no saved class.
        others = {a for k, a in saved if k is kind} or {a for _, a in saved}
        if ours and ours not in others or not ours and others and others <= ATTENTIONS.keys():
            raise UserError(
                f"{type(model).__name__} cannot be saved, because its configuration does not hold "
                f"the attention {attention!r} of {name}; set one attention for the whole model"
            )


def _all_configurations(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """A configuration and the parts inside it."""
    yield config
    for _, part in _parts(config):
        yield from _all_configurations(part)
