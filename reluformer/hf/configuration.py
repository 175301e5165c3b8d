"""Configuration of our own models as transformers models."""

from typing import Any

from transformers import PreTrainedConfig

from reluformer.config.migration import migrate
from reluformer.config.schema import build, to_dict
from reluformer.errors import UserError
from reluformer.model.config import ModelConfig


class ReLUFormerConfig(PreTrainedConfig):  # type: ignore[misc]  # transformers has no types
    """Configuration of a `ReLUFormerForConditionalGeneration` or a `ReLUFormerForCausalLM`.

    Args:
        settings: Fields of `reluformer.ModelConfig`; other sizes follow from them.
    """

    model_type = "reluformer"
    has_no_defaults_at_init = True

    settings: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        model = self.model_config()
        self.settings = to_dict(model)
        self.vocab_size = model.vocabulary
        self.hidden_size = model.width
        self.num_hidden_layers = model.decoder_layers
        self.num_attention_heads = model.heads
        self.num_key_value_heads = model.key_value_heads
        self.head_dim = model.head_width
        ids = {"pad": model.pad_id, "bos": model.bos_id, "eos": model.eos_id}
        for name, value in ids.items():
            kwargs[f"{name}_token_id"] = value
        if not self.architectures:
            # AutoModel chooses between our classes by this name.
            names = ["ReLUFormerForConditionalGeneration"] if self.is_encoder_decoder else []
            self.architectures: list[str] = names
        # Shared tensors are tied, whichever they are.
        kwargs["tie_word_embeddings"] = True
        super().__post_init__(**kwargs)

    @classmethod
    def from_model_config(cls, config: ModelConfig, **fields: Any) -> "ReLUFormerConfig":
        """The configuration of a model of this package."""
        return cls(settings=to_dict(config), **fields)

    def model_config(self) -> ModelConfig:
        """The configuration as our models take it."""
        if self.settings is None:
            raise UserError("settings must hold the fields of ModelConfig, got None")
        return build(ModelConfig, migrate(self.settings), "settings")


def own_attention_error(kind: str) -> UserError:
    """The error of another attention for a model of this package."""
    return UserError(
        f"attn_implementation must not be set for a ReLUFormer, whose settings name its attention, "
        f"got {kind!r}"
    )
