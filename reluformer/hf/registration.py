"""Registration of the family with transformers."""

import functools
from typing import Any

from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
)
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto import configuration_auto

from reluformer.hf.attention_function import attend_module
from reluformer.hf.attention_modules import ignored_error, submodels
from reluformer.hf.configuration import ReLUFormerConfig
from reluformer.hf.layers import (
    OPTIONS_FIELD,
    LayerAttention,
    check_request,
    prepare,
)
from reluformer.hf.masks import attention_mask
from reluformer.hf.models import ReLUFormerForCausalLM, ReLUFormerForConditionalGeneration
from reluformer.hf.saved_configuration import (
    PREFIX,
    refusing_lost_attentions,
    wrap_configurations,
)
from reluformer.hf.translation_pipeline import register_translation
from reluformer.ops.family.table import ATTENTIONS


def register() -> tuple[str, ...]:
    """Register every attention of the family with transformers; `import reluformer.hf` does so.

    Afterwards `attn_implementation="relu"` works in `from_config`, `from_pretrained` and
    `set_attn_implementation`, with the names of `reluformer.ATTENTIONS`. Methods of
    `PreTrainedModel` and `PreTrainedConfig` are wrapped: models get the learned options of their
    attention when they are created, and saved configurations name it.

    Returns:
        The registered names.
    """
    for name in ATTENTIONS:
        AttentionInterface.register(name, attend_module)
        AttentionMaskInterface.register(name, attention_mask)
    if not getattr(PreTrainedModel.post_init, "is_wrapped_by_reluformer", False):
        _wrap_models()
        wrap_configurations()
        # `from_pretrained` sets fields of a configuration from arguments if it has them.
        setattr(PreTrainedConfig, OPTIONS_FIELD, None)
        PreTrainedModel.save_pretrained = refusing_lost_attentions(PreTrainedModel.save_pretrained)
        _register_model_types()
        _register_own_models()
        register_translation()
    return tuple(ATTENTIONS)


def _register_own_models() -> None:
    """Let the Auto classes load our own models."""
    AutoConfig.register(ReLUFormerConfig.model_type, ReLUFormerConfig)
    # With several classes, AutoModel takes the one that a saved configuration names.
    classes = (ReLUFormerForCausalLM, ReLUFormerForConditionalGeneration)
    AutoModel.register(ReLUFormerConfig, classes)
    AutoModelForSeq2SeqLM.register(ReLUFormerConfig, ReLUFormerForConditionalGeneration)
    AutoModelForCausalLM.register(ReLUFormerConfig, ReLUFormerForCausalLM)


def _wrap_models() -> None:
    """Let models create, initialise and replace the learned options of their attention."""
    post_init = PreTrainedModel.post_init
    initialize = PreTrainedModel._initialize_weights
    set_implementation = PreTrainedModel.set_attn_implementation

    @functools.wraps(post_init)
    def post_init_with_options(self: PreTrainedModel) -> None:
        prepare(self)
        post_init(self)

    @functools.wraps(initialize)
    def initialize_with_options(
        self: PreTrainedModel, module: nn.Module, is_custom_code: bool = False
    ) -> None:
        if isinstance(module, LayerAttention):
            module.reset_missing()
        initialize(self, module, is_custom_code)

    @functools.wraps(set_implementation)
    def set_implementation_with_options(
        self: PreTrainedModel, attn_implementation: Any, *arguments: Any, **options: Any
    ) -> None:
        check_request(self, attn_implementation)
        for part in submodels(self):
            # transformers skips configurations with this mark, and forgets to remove some marks.
            vars(part.config).pop("_attn_was_changed", None)
        set_implementation(self, attn_implementation, *arguments, **options)
        _set_copied_configurations(self)
        prepare(self)

    post_init_with_options.is_wrapped_by_reluformer = True  # type: ignore[attr-defined]
    PreTrainedModel.post_init = post_init_with_options
    PreTrainedModel._initialize_weights = initialize_with_options
    PreTrainedModel.set_attn_implementation = set_implementation_with_options
    for name in ("_from_config", "from_pretrained"):
        setattr(PreTrainedModel, name, _refusing(getattr(PreTrainedModel, name).__func__))


def _refusing(constructor: Any) -> Any:
    """Wrap a class method that creates a model.

    Some models look up the class of their attention, by the name of the attention, in a table of
    their own, before `prepare` can refuse them: Falcon, GPT-J, GPT-Neo.
    """

    @functools.wraps(constructor)
    def construct(cls: type[PreTrainedModel], *arguments: Any, **options: Any) -> Any:
        try:
            return constructor(cls, *arguments, **options)
        except KeyError as error:
            if error.args and error.args[0] in ATTENTIONS:
                raise ignored_error(cls, error.args[0]) from error
            raise

    return classmethod(construct)


def _set_copied_configurations(model: PreTrainedModel) -> None:
    """Give submodels whose configuration is a copy of their parent's the parent's attention.

    `set_attn_implementation` does not visit them: the encoder and the decoder of T5. Attentions of
    transformers are left to transformers.
    """
    for parent in submodels(model):
        kind = parent.config._attn_implementation
        for part in submodels(parent):
            config = part.config
            is_copy = config is not parent.config and type(config) is type(parent.config)
            if is_copy and {kind, config._attn_implementation} & ATTENTIONS.keys():
                config._attn_implementation_internal = kind
                setattr(config, OPTIONS_FIELD, getattr(parent.config, OPTIONS_FIELD, None))


def _register_model_types() -> None:
    """Let the Auto classes load saved models: each type with the prefix has the same classes."""
    names = configuration_auto.CONFIG_MAPPING_NAMES
    modules = configuration_auto.SPECIAL_MODEL_TYPE_TO_MODULE_NAME
    for model_type in names:
        modules[PREFIX + model_type] = configuration_auto.model_type_to_module_name(model_type)
    # A copy: the tables of models look up the type of a configuration class in the original.
    mapping = configuration_auto.CONFIG_MAPPING
    mapping._mapping = {**names, **{PREFIX + name: value for name, value in names.items()}}
