"""Base class of our own models as transformers models: creation, decoding and losses."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import PreTrainedModel

from reluformer.errors import UserError
from reluformer.hf.caches import (
    AdaptedCache,
    cached_length,
    self_cache,
    source_keys,
    visible_keys,
)
from reluformer.hf.configuration import ReLUFormerConfig, own_attention_error
from reluformer.model import ReLUFormer, ReLUFormerLM
from reluformer.model.base import Reports
from reluformer.model.blocks import DecoderLayer
from reluformer.model.kv_cache import GrowingCache
from reluformer.model.losses import attention_losses
from reluformer.model.records import AttentionRecord, ForwardOptions
from reluformer.nn.core import ROW_LOSS
from reluformer.nn.row_loss import add_gradient
from reluformer.ops.family.table import ATTENTIONS

SAMPLED_ROWS = 64
"""Number of query rows of each attention whose statistics a model reports."""


class Decoded(NamedTuple):
    """Result of the decoder."""

    logits: Tensor
    """[B, T, vocabulary]."""
    records: tuple[AttentionRecord, ...]
    """Records of its attentions, if recorded."""


class ReLUFormerPreTrainedModel(PreTrainedModel):  # type: ignore[misc]  # no types there
    """Base class: a model of this package as the submodule `model`.

    In training, the backward pass adds the gradients of the row and entropy losses with the weights
    `row_loss` and `entropy_loss`, times `row_loss_scale`, as in `reluformer.nn.core.AttentionCore`.
    """

    config_class = ReLUFormerConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    model_class: type[ReLUFormer] | type[ReLUFormerLM]
    row_loss_scale: float | Tensor

    def __init__(self, config: ReLUFormerConfig) -> None:
        check_class(config, type(self))
        if config._attn_implementation in ATTENTIONS:
            raise own_attention_error(config._attn_implementation)
        if issubclass(self.model_class, ReLUFormer):
            config.is_encoder_decoder = True
            config.decoder_start_token_id = config.bos_token_id
        super().__init__(config)
        self.model = self.model_class(config.model_config())
        self.row_loss = ROW_LOSS if self.model.config.regularisable_sites else 0.0
        self.entropy_loss = 0.0
        self.row_loss_scale = 1.0
        self.statistics: list[AttentionRecord] | None = None
        """While this is a list, forward passes append statistics of a sample of rows to it."""
        first: dict[int, str] = {}
        tied = {}
        for name, parameter in self.named_parameters(remove_duplicate=False):
            original = first.setdefault(id(parameter), name)
            if original != name:
                tied[name] = original
        self._tied_weights_keys = tied
        self.post_init()

    @classmethod
    def from_model(cls, model: ReLUFormer | ReLUFormerLM) -> "ReLUFormerPreTrainedModel":
        """Wrap a model of this package; the parameters are shared."""
        fields = {"is_encoder_decoder": isinstance(model, ReLUFormer)}
        with torch.device("meta"):
            wrapped = cls(ReLUFormerConfig.from_model_config(model.config, **fields))
        wrapped.model = model
        return wrapped

    def get_input_embeddings(self) -> nn.Module:
        """Embedding of the source, or of the text of a language model."""
        return getattr(self.model, "source_embedding", self.model.target_embedding)

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Refuse other embeddings: the settings of the model fix its vocabulary."""
        raise UserError(
            "the embeddings of a ReLUFormer cannot be replaced or resized; train a new model with "
            "another vocabulary"
        )

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor, **kwargs: Any) -> Tensor:
        """Let `generate` pass on the padding mask [B, T], also with a static cache."""
        return attention_mask

    def _init_weights(self, module: nn.Module) -> None:
        """Our models initialise themselves."""

    @property
    def _adds_losses(self) -> bool:
        has_weight = bool(self.row_loss or self.entropy_loss)
        return has_weight and self.training and torch.is_grad_enabled()

    def _options(self, lengths: Tensor | None, has_maps: bool) -> ForwardOptions:
        """Options of a forward pass over queries with these lengths [B]."""
        if self.statistics is not None:
            return ForwardOptions(lengths, "stats", SAMPLED_ROWS)
        if has_maps:
            return ForwardOptions(lengths, "weights")
        if self._adds_losses:
            return ForwardOptions(lengths, "entropy" if self.entropy_loss else "row_sum")
        return ForwardOptions(lengths)

    def _decode(
        self,
        ids: Tensor,
        past: Any,
        options: ForwardOptions,
        encoded: BaseModelOutput | None = None,
        *,
        lengths: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Decoded:
        """Run the decoder on ids [B, T] after the tokens of a cache.

        Args:
            ids: Token ids.
            past: Cache of transformers, or None.
            options: Options of the forward pass.
            encoded: Output of the encoder, if the model has one.
            lengths: Number of source tokens, [B].
            mask: Padding mask [B, tokens in the cache + T] if padding is not on the right.
        """
        start = cached_length(past)
        visible = positions = None
        if mask is not None:
            visible = visible_keys(mask, ids.shape[1])
            positions = (mask.cumsum(dim=-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        x = self.model.embed(
            ids, self.model.target_embedding, start if positions is None else positions
        )
        reports = Reports()
        for index, layer in enumerate(self.model.decoder):
            assert isinstance(layer, DecoderLayer)
            cache: GrowingCache | None = None
            if past is not None:
                cache = AdaptedCache(cache=self_cache(past), layer=index, length=start)
            elif visible is not None:
                cache = GrowingCache()
            if cache is not None:
                cache.visible = visible
                cache.start = start if positions is None else positions  # type: ignore[assignment]
            source = None
            if encoded is not None:
                source = source_keys(layer, index, encoded.last_hidden_state, past)
            x = reports.collect("decoder", index, layer(x, options, source, lengths, cache))
        records, _ = reports.tuples()
        return Decoded(self.model.logits(self.model.decoder_norm(x)), records)

    def _finish(self, logits: Tensor, records: Sequence[AttentionRecord]) -> Tensor:
        """`logits`, whose backward pass adds the losses of all records of a forward pass."""
        if self.statistics is not None:
            self.statistics.extend(records)
            return logits
        if not self._adds_losses:
            return logits
        sites = self.model.config.regularisable_sites
        regularised = [record for record in records if record.site in sites]
        if not regularised:
            return logits
        losses = attention_losses(regularised)
        weights = ((losses.normalisation, self.row_loss), (losses.entropy, self.entropy_loss))
        for loss, weight in weights:
            if weight:
                gradient = torch.ones_like(loss) * (weight * self.row_loss_scale)
                logits = add_gradient(logits, loss, gradient)
        return logits


def check_class(config: ReLUFormerConfig, kind: type[ReLUFormerPreTrainedModel]) -> None:
    """Refuse to load the weights of one of our classes as another."""
    saved = config.architectures
    has_encoder = issubclass(kind.model_class, ReLUFormer)
    if saved and bool(config.is_encoder_decoder) != has_encoder:
        raise UserError(f"{kind.__name__} cannot load a {saved[0]}; use {saved[0]} or AutoModel")


def maps_at(site: str, records: Sequence[AttentionRecord]) -> tuple[Tensor, ...] | None:
    """Attention maps of the layers at a site; None if there are none."""
    maps = tuple(r.weights for r in records if r.site == site and r.weights is not None)
    return maps or None
