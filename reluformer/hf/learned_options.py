"""Learned options of attentions (thresholds, sinks, temperatures, gains, gates) in any model.

They are a submodule `reluformer` of each attention module of a transformers model, so that
optimizers, checkpoints and `save_pretrained` handle them as all other parameters.
"""

import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from reluformer.errors import UserError
from reluformer.ops.definition import Attention
from reluformer.ops.family.table import ATTENTIONS

ATTRIBUTE = "reluformer"
"""Name of the submodule."""

_HEADS = ("num_heads", "n_heads", "num_attention_heads")
_WIDTHS = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size")
_NEUTRAL = {"gain": 1.0, "gate": 0.0, "mix": 1.0}


class LearnedOptions(nn.Module):
    """Learned options of one attention module.

    Args:
        attention: Row of `reluformer.ATTENTIONS`.
        heads: Number of query heads H.
        width: Width of a value head Dv.
        inputs: Width of the hidden states, for a gate that depends on the token.
        fixed: Options that are not learned.
    """

    def __init__(
        self, attention: Attention, heads: int, width: int, inputs: int, fixed: dict[str, Any]
    ) -> None:
        super().__init__()
        self.attention, self.heads = attention.name, heads
        shapes = {"head": (heads,), "width": (heads * width,), "pair": (2,)}
        self.names = tuple(learned_names(attention, fixed))
        for name in self.names:
            shape = attention.learned[name]
            if shape == "token":
                self.gate_projection = nn.Linear(inputs, heads * width)
            else:
                self.register_parameter(name, nn.Parameter(torch.empty(shapes[shape])))
        self.token_gate: Tensor | None = None
        self.hook: Any = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set every option to its default or neutral value."""
        defaults = ATTENTIONS[self.attention].defaults
        for name in self.names:
            parameter = getattr(self, name, None)
            if parameter is not None and not getattr(parameter, "_is_hf_initialized", False):
                value = _NEUTRAL[name] if name in _NEUTRAL else float(defaults[name])
                nn.init.constant_(parameter, value)

    def values(self) -> dict[str, Tensor]:
        """The options as keyword arguments of the attention."""
        options = {name: getattr(self, name) for name in self.names if hasattr(self, name)}
        if self.token_gate is not None:
            options["gate"] = self.token_gate
            # The next call of the module computes its own gate.
            self.token_gate = None
        return options

    def compute_gate(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the attention module: the gate [B, H, T, Dv] of its input."""
        x = args[0] if args else kwargs["hidden_states"]
        self.token_gate = self.gate_projection(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)


def learned_names(attention: Attention, fixed: dict[str, Any]) -> Iterator[str]:
    """Names of the options that a transformers model learns.

    The published ReLU attention has gamma 1 and no threshold unless `fixed` sets them.
    """
    for name in attention.learned:
        if name not in fixed and attention.name != "relu":
            yield name


def fixed_options(config: PreTrainedConfig) -> dict[str, Any]:
    """Options of the attention that the configuration sets: its field `attention_options`."""
    return dict(getattr(config, "attention_options", None) or {})


def attention_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules that call transformers' attention interface."""
    for name, module in model.named_modules():
        if _calls_interface(type(module)) and isinstance(
            getattr(module, "config", None), PreTrainedConfig
        ):
            yield name, module


@cache
def _calls_interface(kind: type[nn.Module]) -> bool:
    """Whether `forward` of a class looks up `config._attn_implementation`."""
    if kind.forward is nn.Module.forward:
        return False
    try:
        source = inspect.getsource(kind.forward)
    except (OSError, TypeError):
        return False
    return "ALL_ATTENTION_FUNCTIONS" in source


def prepare(model: nn.Module) -> nn.Module:
    """Give each attention module of a transformers model the learned options of its attention.

    Registration does this for new and loaded models and after `set_attn_implementation`. Modules
    with another attention lose their options. An optimizer must be created afterwards.

    Args:
        model: A transformers model or part of one.

    Returns:
        The model.

    Raises:
        UserError: If the number of heads of an attention module cannot be determined.
    """
    for name, module in attention_modules(model):
        attention = ATTENTIONS.get(module.config._attn_implementation)
        options = getattr(module, ATTRIBUTE, None)
        if attention is not None and options is not None and options.attention == attention.name:
            continue
        if options is not None:
            _detach(module, options)
        if attention is None:
            continue
        fixed = fixed_options(module.config)
        if any(learned_names(attention, fixed)):
            _attach(name, module, attention, fixed)
    return model


def _attach(name: str, module: nn.Module, attention: Attention, fixed: dict[str, Any]) -> None:
    """Add the submodule to one attention module, on the device and dtype of its weights."""
    heads = _size(module, _HEADS) or getattr(module.config, "num_attention_heads", None)
    hidden = getattr(module.config, "hidden_size", None)
    width = _size(module, _WIDTHS) or (hidden // heads if heads and hidden else None)
    if heads is None or width is None:
        raise UserError(
            f"attn_implementation={attention.name!r} needs the number and width of heads, and "
            f"{name or 'the model'} ({type(module).__name__}) has neither "
            f"{', '.join(_HEADS)} nor {', '.join(_WIDTHS)}"
        )
    options = LearnedOptions(attention, heads, width, hidden or heads * width, fixed)
    like = next(module.parameters(), None)
    if like is not None and like.device.type != "meta" and like.is_floating_point():
        options = options.to(like.device, like.dtype)
    module.add_module(ATTRIBUTE, options)
    if hasattr(options, "gate_projection"):
        options.hook = module.register_forward_pre_hook(options.compute_gate, with_kwargs=True)


def _detach(module: nn.Module, options: LearnedOptions) -> None:
    """Remove the submodule of one attention module."""
    if options.hook is not None:
        options.hook.remove()
    delattr(module, ATTRIBUTE)


def _size(module: nn.Module, names: tuple[str, ...]) -> int | None:
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, int):
            return value
    return None
