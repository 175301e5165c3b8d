"""The attention of each attention module of a transformers model, with its learned options.

It is the submodule `reluformer` of the module, so that optimizers, checkpoints and
`save_pretrained` handle thresholds, sinks, temperatures and gates as all other parameters.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from reluformer.errors import UserError
from reluformer.hf.attention_modules import (
    attention_modules,
    head_sizes,
    ignored_error,
    ignores_interface,
    is_cross_attention,
    knows_causality,
    submodels,
    warn_of_softmax,
)
from reluformer.hf.configuration import ReLUFormerConfig, own_attention_error
from reluformer.hf.masks import NEEDS_MASKS
from reluformer.nn.core import RECOMMENDED, AttentionCore
from reluformer.nn.options import options_dict
from reluformer.ops.family.table import ATTENTIONS, lookup

ATTRIBUTE = "reluformer"
"""Name of the submodule."""
OPTIONS_FIELD = "attention_options"
"""Field of a configuration with options of the attention, as `AttentionCore` takes them."""


class LayerAttention(AttentionCore):
    """`AttentionCore` of one attention module; it also projects the gate of `gated`.

    Args:
        heads: Number H of query heads.
        head_dim: Width D of a head.
        attention: Name in `reluformer.ATTENTIONS`.
        options: Options of the attention.
        value_dim: Width Dv of a value; None for `head_dim`.
        hidden: Width of the hidden states.
        is_cross: Whether the keys belong to another sequence than the queries.
    """

    def __init__(
        self,
        heads: int,
        head_dim: int,
        attention: str,
        options: Mapping[str, Any],
        *,
        value_dim: int | None = None,
        hidden: int | None = None,
        is_cross: bool = False,
    ) -> None:
        super().__init__(heads, head_dim, attention, options, value_dim=value_dim)
        self.is_cross = is_cross
        self.given_options = dict(options)
        self.gate: Tensor | None = None
        self._hook: Any = None
        if self.needs_gate:
            width = heads * self.value_dim
            self.gate_projection = nn.Linear(hidden or width, width)

    @property
    def takes_packed(self) -> bool:
        """Whether `packed` runs this attention: rectified weights without norm or gate."""
        rule = self.row.rectified(self.fixed_options)
        plain = rule is not None and rule.negative_slope == 0 and not self.row.cosine
        return plain and self.row.output_transform is None

    def attach(self, module: nn.Module) -> None:
        """Become the submodule of an attention module."""
        module.add_module(ATTRIBUTE, self)
        if self.needs_gate:
            self._hook = module.register_forward_pre_hook(self._compute_gate, with_kwargs=True)

    def detach(self, module: nn.Module) -> None:
        """Undo `attach`."""
        if self._hook is not None:
            self._hook.remove()
        delattr(module, ATTRIBUTE)

    def take_gate(self) -> Tensor | None:
        """The gate [B, H, T, Dv] of the present call of the attention module, or None."""
        gate, self.gate = self.gate, None
        if self.needs_gate and gate is None:
            raise UserError(
                f"{self.row.name} attention needs a module that attends once in a forward pass"
            )
        return gate

    @torch.no_grad()
    def reset_missing(self) -> None:
        """Set offsets that a checkpoint did not hold to zero."""
        for name, parameter in self.named_parameters(recurse=False):
            if name.endswith("_offset") and not getattr(parameter, "_is_hf_initialized", False):
                parameter.zero_()

    def _compute_gate(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the attention module."""
        x = args[0] if args else kwargs["hidden_states"]
        self.gate = self.gate_projection(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Replacement(NamedTuple):
    """Result of `replace_attention_modules`."""

    changed: list[tuple[str, str]]
    """Path and class name of each attention module that has the new attention."""
    unchanged: list[tuple[str, str]]
    """Path of each attention module that keeps its attention, and the reason."""


def layer_attentions(model: nn.Module) -> list[LayerAttention]:
    """The attentions of this package in a transformers model, in order."""
    return [module for module in model.modules() if isinstance(module, LayerAttention)]


def prepare(model: nn.Module) -> nn.Module:
    """Give each attention module of a transformers model the attention that its config names.

    Registration does this for new and loaded models and after `set_attn_implementation`. A
    module whose config names an attention of transformers loses its submodule `reluformer`. Create
    the optimizer afterwards.

    Args:
        model: A transformers model or part of one.

    Returns:
        The model.

    Raises:
        UserError: If an option is not allowed, the number of heads cannot be determined, or the
            model would compute its own attention.
    """
    for part in submodels(model):
        kind = part.config._attn_implementation
        if kind in ATTENTIONS and ignores_interface(part):
            raise ignored_error(type(part), kind)
        if kind in ATTENTIONS:
            warn_of_softmax(part, kind)
            if not knows_causality(part):
                NEEDS_MASKS.add(type(part.config))
    for name, module in attention_modules(model):
        config = module.config
        assert isinstance(config, PreTrainedConfig)
        kind = config._attn_implementation
        options = options_dict(getattr(config, OPTIONS_FIELD, None))
        present = getattr(module, ATTRIBUTE, None)
        if present is not None:
            if (present.row.name, present.given_options) == (kind, options):
                continue
            present.detach(module)
        if kind in ATTENTIONS:
            _create(name, module, kind, options).attach(module)
    return model


def check_request(
    model: PreTrainedModel,
    request: str | Mapping[str, str] | None,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Refuse to set our attention in models and submodels that cannot have it.

    Args:
        model: The model.
        request: Argument of `set_attn_implementation`: the name of an attention, or one for each
            part of the configuration.
        options: Options of the attention; None for those of each part's configuration.

    Raises:
        UserError: If the model or a part does not call transformers' attention interface, or an
            option is not allowed.
    """
    config = model.config
    for part in submodels(model):
        kind = request
        if isinstance(request, Mapping):
            parts = (k for k in config.sub_configs if getattr(config, k, None) is part.config)
            kind = request.get(next(parts, ""))
        if kind not in ATTENTIONS:
            continue
        if isinstance(part.config, ReLUFormerConfig):
            raise own_attention_error(str(kind))
        has_none = part is model and not any(attention_modules(model))
        if has_none or ignores_interface(part):
            raise ignored_error(type(part), str(kind))
        fields = getattr(part.config, OPTIONS_FIELD, None) if options is None else options
        own = ((n, m) for n, m in attention_modules(part) if m.config is part.config)
        # Most layers have the same sizes, and one check serves them all.
        for heads, width, value_dim in {head_sizes(n, m, str(kind)) for n, m in own}:
            AttentionCore(heads, width, str(kind), fields, value_dim=value_dim)


def replace_attention_modules(
    model: PreTrainedModel, kind: str = RECOMMENDED, options: Mapping[str, Any] | None = None
) -> Replacement:
    """Replace the attention of every attention module of a transformers model.

    Args:
        model: The model.
        kind: Name in `reluformer.ATTENTIONS`; the default is `normalised_relu`.
        options: Options of the attention, as `AttentionCore` takes them.

    Returns:
        The modules that have the new attention, and those that keep theirs.

    Raises:
        UserError: If the attention or an option is not allowed, or the model has no attention that
            can be replaced.
    """
    options = options_dict(options)
    check_replacement(model, kind, options)
    for module in model.modules():
        if isinstance(config := getattr(module, "config", None), PreTrainedConfig):
            setattr(config, OPTIONS_FIELD, dict(options))
    model.set_attn_implementation(kind)
    changed, unchanged = [], []
    for name, module in attention_modules(model):
        if isinstance(getattr(module, ATTRIBUTE, None), LayerAttention):
            changed.append((name, type(module).__name__))
        else:
            unchanged.append((name, f"its model does not support attn_implementation={kind!r}"))
    return Replacement(changed, unchanged)


def check_replacement(
    model: PreTrainedModel, kind: str = RECOMMENDED, options: Mapping[str, Any] | None = None
) -> None:
    """Raise the errors of `replace_attention_modules`, and leave the model as it is."""
    lookup(kind)
    check_request(model, kind, options_dict(options))


def _create(name: str, module: nn.Module, kind: str, options: dict[str, Any]) -> LayerAttention:
    """The attention of one module, on the device and in the dtype of its weights."""
    heads, width, value_dim = head_sizes(name, module, kind)
    hidden = getattr(module.config, "hidden_size", None)
    layer = LayerAttention(
        heads,
        width,
        kind,
        options,
        value_dim=value_dim,
        hidden=hidden,
        is_cross=is_cross_attention(name),
    )
    like = next(module.parameters(), None)
    if like is not None and like.is_floating_point() and like.device.type != "meta":
        layer = layer.to(like.dtype)
        # A model that is being loaded has its new parameters on the meta device.
        if not any(parameter.is_meta for parameter in layer.parameters()):
            layer = layer.to(like.device)
    return layer.train(module.training)
