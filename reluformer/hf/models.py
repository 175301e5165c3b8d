"""Our own models as transformers models, in the Auto classes and with `generate`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GenerationMixin
from transformers.modeling_outputs import (
    BaseModelOutput,
    CausalLMOutputWithPast,
    Seq2SeqLMOutput,
)
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import can_return_tuple

from reluformer.errors import UserError
from reluformer.hf.caches import (
    AdaptedCache,
    cached_length,
    self_cache,
    source_keys,
    visible_keys,
)
from reluformer.hf.configuration import ReLUFormerConfig
from reluformer.hf.hidden_states import collecting
from reluformer.model import ReLUFormer, ReLUFormerLM
from reluformer.model.blocks import DecoderLayer, LayerOutput
from reluformer.model.kv_cache import GrowingCache
from reluformer.model.records import DEFAULT_OPTIONS, ForwardOptions, Record
from reluformer.ops.family.table import ATTENTIONS


class _Decoded(NamedTuple):
    """Logits [B, T, vocabulary] of a decoder, and maps of its layers if requested."""

    logits: Tensor
    self_maps: tuple[Tensor, ...] | None
    cross_maps: tuple[Tensor, ...] | None


class ReLUFormerPreTrainedModel(PreTrainedModel):  # type: ignore[misc]  # no types there
    """Base class: a model of this package as the submodule `model`."""

    config_class = ReLUFormerConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    model_class: type[ReLUFormer] | type[ReLUFormerLM]

    def __init__(self, config: ReLUFormerConfig) -> None:
        if config._attn_implementation in ATTENTIONS:
            raise UserError(
                f"attn_implementation must not be set for a ReLUFormer, whose settings name its "
                f"attention, got {config._attn_implementation!r}"
            )
        super().__init__(config)
        self.model = self.model_class(config.model_config())
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

    def _init_weights(self, module: nn.Module) -> None:
        """Our models initialise themselves."""

    def _decode(
        self,
        ids: Tensor,
        past: Any,
        options: ForwardOptions,
        encoded: BaseModelOutput | None = None,
        *,
        lengths: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> _Decoded:
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
        outputs: list[LayerOutput] = []
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
            outputs.append(layer(x, options, source, lengths, cache))
            x = outputs[-1].x
        logits = self.model.logits(self.model.decoder_norm(x))
        if options.record != "weights":
            return _Decoded(logits, None, None)
        self_maps = _maps([output.self_attention for output in outputs])
        return _Decoded(logits, self_maps, _maps([output.cross_attention for output in outputs]))


class ReLUFormerForConditionalGeneration(ReLUFormerPreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """`reluformer.ReLUFormer` as a sequence-to-sequence model of transformers."""

    model_class = ReLUFormer

    def __init__(self, config: ReLUFormerConfig) -> None:
        config.is_encoder_decoder = True
        if getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = config.bos_token_id
        super().__init__(config)
        self.generation_config.decoder_start_token_id = config.bos_token_id

    def get_encoder(self, modality: str | None = None) -> "_Encoder":
        """The encoder as `generate` calls it."""
        return _Encoder(self)

    def encode(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> BaseModelOutput:
        """Hidden states [B, S, width] of source ids [B, S], padded on the right."""
        record: Record = "weights" if kwargs.get("output_attentions") else "nothing"
        lengths = _right_padded_lengths(attention_mask)
        model, has_states = self.model, bool(kwargs.get("output_hidden_states"))
        assert isinstance(model, ReLUFormer)
        with collecting(model.encoder, model.encoder_norm, has_states) as states:
            encoded = model.encode(input_ids, lengths, record=record)
        maps = tuple(r.weights for r in encoded.records) if record == "weights" else None
        return BaseModelOutput(encoded.hidden, hidden_states=states.tensors, attentions=maps)

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | Sequence[Tensor] | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """Compute logits of the next target tokens, and the loss of `labels`.

        Args:
            input_ids: Source ids [B, S], padded on the right.
            attention_mask: 1 for source tokens, 0 for padding, [B, S].
            decoder_input_ids: Target ids [B, T], beginning with bos; made from `labels` if None.
            decoder_attention_mask: Not used: padding follows the tokens, which do not see it.
            encoder_outputs: Result of `encode`, in place of `input_ids`.
            past_key_values: Cache of the target tokens before `decoder_input_ids`; it is extended.
            labels: Target ids [B, T], ending with eos; -100 is ignored.
            output_attentions: Whether to return attention maps.
            **kwargs: `num_items_in_batch` divides the summed loss. `output_hidden_states` returns
                the embeddings and the output of each layer.
        """
        encoded: Any = encoder_outputs
        has_states = bool(kwargs.get("output_hidden_states"))
        if encoded is None:
            if input_ids is None:
                raise UserError("input_ids or encoder_outputs must be given, not inputs_embeds")
            encoded = self.encode(
                input_ids,
                attention_mask,
                output_attentions=output_attentions,
                output_hidden_states=has_states,
            )
        elif not isinstance(encoded, BaseModelOutput):
            encoded = BaseModelOutput(last_hidden_state=encoded[0])
        if decoder_input_ids is None:
            if labels is None:
                raise UserError("decoder_input_ids or labels must be given")
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        options = DEFAULT_OPTIONS._replace(record="weights" if output_attentions else "nothing")
        lengths = None if attention_mask is None else attention_mask.sum(dim=-1)
        decoder, norm = self.model.decoder, self.model.decoder_norm
        with collecting(decoder, norm, has_states) as states:
            decoded = self._decode(
                decoder_input_ids, past_key_values, options, encoded, lengths=lengths
            )
        loss = None
        if labels is not None:
            loss = _cross_entropy(decoded.logits, labels, kwargs.get("num_items_in_batch"))
        return Seq2SeqLMOutput(
            loss=loss,
            logits=decoded.logits,
            past_key_values=past_key_values,
            decoder_hidden_states=states.tensors,
            decoder_attentions=decoded.self_maps,
            cross_attentions=decoded.cross_maps,
            encoder_last_hidden_state=encoded.last_hidden_state,
            encoder_hidden_states=encoded.hidden_states,
            encoder_attentions=encoded.attentions,
        )

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Decoder input [B, T]: bos, then the labels but the last, with padding for -100."""
        shifted = functional.pad(labels[:, :-1], (1, 0), value=self.config.bos_token_id)
        return shifted.masked_fill(shifted == -100, self.config.pad_token_id)


class ReLUFormerForCausalLM(ReLUFormerPreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """`reluformer.ReLUFormerLM` as a language model of transformers."""

    model_class = ReLUFormerLM

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Compute logits of the next tokens, and the loss of `labels`.

        Args:
            input_ids: Token ids [B, T], padded on either side.
            attention_mask: 1 for tokens, 0 for padding, [B, tokens in the cache + T].
            past_key_values: Cache of the tokens before `input_ids`.
            labels: Token ids [B, T], which are shifted here; -100 is ignored.
            use_cache: Not used; a cache is used if it is given.
            output_attentions: Whether to return attention maps.
            output_hidden_states: Whether to return the embeddings and the output of each layer.
            logits_to_keep: Return the logits of the last N positions only; 0 returns all.
            **kwargs: `num_items_in_batch` divides the summed loss.
        """
        if input_ids is None:
            raise UserError("input_ids must be given; a ReLUFormer takes no inputs_embeds")
        options = DEFAULT_OPTIONS._replace(record="weights" if output_attentions else "nothing")
        # Padding behind the tokens is not seen by them.
        mask = None if _is_right_padded(attention_mask) else attention_mask
        decoder, norm = self.model.decoder, self.model.decoder_norm
        with collecting(decoder, norm, output_hidden_states) as states:
            decoded = self._decode(input_ids, past_key_values, options, mask=mask)
        logits, loss = decoded.logits[:, -logits_to_keep:], None
        if labels is not None:
            items = kwargs.get("num_items_in_batch")
            loss = _cross_entropy(decoded.logits[:, :-1], labels[:, 1:], items)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=past_key_values,
            hidden_states=states.tensors,
            attentions=decoded.self_maps,
        )


class _Encoder:
    """The encoder of a model with the interface that `generate` expects."""

    main_input_name = "input_ids"

    def __init__(self, model: ReLUFormerForConditionalGeneration) -> None:
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> BaseModelOutput:
        return self.model.encode(input_ids, attention_mask, **kwargs)

    __call__ = forward


def _maps(reports: Sequence[Any]) -> tuple[Tensor, ...] | None:
    """Attention maps of the layers; None if there are none."""
    maps = tuple(report.weights for report in reports if report is not None)
    return maps or None


def _is_right_padded(mask: Tensor | None) -> bool:
    """Whether padding, if any, follows the tokens in every row of a mask [B, T]."""
    return mask is None or bool((mask.diff(dim=-1) <= 0).all())


def _right_padded_lengths(mask: Tensor | None) -> Tensor | None:
    """Number of tokens of each row of a padding mask [B, S]."""
    if mask is None:
        return None
    if not torch.compiler.is_compiling() and not _is_right_padded(mask):
        raise UserError("attention_mask must have its padding on the right")
    return mask.sum(dim=-1)


def _cross_entropy(logits: Tensor, labels: Tensor, items: Any) -> Tensor:
    """Mean loss over labels other than -100, or the sum divided by the number of items."""
    flat, labels = logits.float().flatten(0, 1), labels.flatten().to(logits.device)
    total = functional.cross_entropy(flat, labels, reduction="sum")
    mean: Tensor = total / ((labels != -100).sum() if items is None else items)
    return mean
