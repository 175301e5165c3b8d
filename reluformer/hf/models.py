"""Our own models as transformers models, in the Auto classes and with `generate`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import GenerationMixin
from transformers.modeling_outputs import (
    BaseModelOutput,
    CausalLMOutputWithPast,
    Seq2SeqLMOutput,
)
from transformers.utils.generic import can_return_tuple

from reluformer.errors import UserError
from reluformer.hf.hidden_states import collecting
from reluformer.hf.pretrained_model import ReLUFormerPreTrainedModel, maps_at
from reluformer.model import ReLUFormer, ReLUFormerLM
from reluformer.model.records import AttentionRecord


class ReLUFormerForConditionalGeneration(ReLUFormerPreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """`reluformer.ReLUFormer` as a sequence-to-sequence model of transformers."""

    model_class = ReLUFormer

    def get_encoder(self, modality: str | None = None) -> "_Encoder":
        """The encoder as `generate` calls it."""
        return _Encoder(self)

    def encode(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> BaseModelOutput:
        """Hidden states [B, S, width] of source ids [B, S], padded on the right."""
        return self._encode(input_ids, attention_mask, **kwargs)[0]

    def _encode(
        self, input_ids: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[BaseModelOutput, tuple[AttentionRecord, ...]]:
        """`encode`, and the records of the attentions."""
        lengths = _right_padded_lengths(attention_mask)
        options = self._options(lengths, bool(kwargs.get("output_attentions")))
        model, has_states = self.model, bool(kwargs.get("output_hidden_states"))
        assert isinstance(model, ReLUFormer)
        with collecting(model.encoder, model.encoder_norm, has_states) as states:
            encoded = model.encode(
                input_ids, lengths, record=options.record, sample_rows=options.sample_rows
            )
        maps = maps_at("encoder", encoded.records)
        output = BaseModelOutput(encoded.hidden, hidden_states=states.tensors, attentions=maps)
        return output, encoded.records

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
            decoder_attention_mask: 1 for target tokens, 0 for padding, which follows them, [B, T];
                by default padding is where `labels` end with -100.
            encoder_outputs: Result of `encode`, in place of `input_ids`.
            past_key_values: Cache of the target tokens before `decoder_input_ids`; it is extended.
            labels: Target ids [B, T], ending with eos; -100 is ignored.
            output_attentions: Whether to return attention maps.
            **kwargs: `num_items_in_batch` divides the summed loss. `output_hidden_states` returns
                the embeddings and the output of each layer.
        """
        encoded: Any = encoder_outputs
        records: tuple[AttentionRecord, ...] = ()
        has_states = bool(kwargs.get("output_hidden_states"))
        if encoded is None:
            if input_ids is None:
                raise UserError("input_ids or encoder_outputs must be given, not inputs_embeds")
            encoded, records = self._encode(
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
        options = self._options(_target_lengths(decoder_attention_mask, labels), output_attentions)
        lengths = None if attention_mask is None else attention_mask.sum(dim=-1)
        decoder, norm = self.model.decoder, self.model.decoder_norm
        with collecting(decoder, norm, has_states) as states:
            decoded = self._decode(
                decoder_input_ids, past_key_values, options, encoded, lengths=lengths
            )
        logits, loss = self._finish(decoded.logits, records + decoded.records), None
        if labels is not None:
            loss = _cross_entropy(logits, labels, kwargs.get("num_items_in_batch"))
        return Seq2SeqLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=past_key_values,
            decoder_hidden_states=states.tensors,
            decoder_attentions=maps_at("decoder", decoded.records),
            cross_attentions=maps_at("cross", decoded.records),
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
        logits_to_keep: int | Tensor = 0,
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
            logits_to_keep: Number of last positions whose logits are returned, 0 for all, or a
                tensor of positions.
            **kwargs: `num_items_in_batch` divides the summed loss.
        """
        if input_ids is None:
            raise UserError("input_ids must be given; a ReLUFormer takes no inputs_embeds")
        if attention_mask is None and _is_packed(kwargs.get("position_ids")):
            raise UserError("position_ids must not begin again; a ReLUFormer takes no packed batch")
        # Padding behind the tokens is not seen by them.
        mask = None if _is_right_padded(attention_mask) else attention_mask
        lengths = None
        if mask is None and attention_mask is not None and past_key_values is None:
            lengths = attention_mask.sum(dim=-1)
        options = self._options(lengths, output_attentions)
        decoder, norm = self.model.decoder, self.model.decoder_norm
        with collecting(decoder, norm, output_hidden_states) as states:
            decoded = self._decode(input_ids, past_key_values, options, mask=mask)
        logits, loss = self._finish(decoded.logits, decoded.records), None
        if labels is not None:
            items = kwargs.get("num_items_in_batch")
            loss = _cross_entropy(logits[:, :-1], labels[:, 1:], items)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits[:, kept],
            past_key_values=past_key_values,
            hidden_states=states.tensors,
            attentions=maps_at("decoder", decoded.records),
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


def _is_right_padded(mask: Tensor | None) -> bool:
    """Whether padding, if any, follows the tokens in every row of a mask [B, T]."""
    return mask is None or bool((mask.long().diff(dim=-1) <= 0).all())


def _is_packed(position_ids: Tensor | None) -> bool:
    """Whether positions [B, T] begin again, which marks packed sequences."""
    if position_ids is None or torch.compiler.is_compiling():
        return False
    return bool((position_ids.diff(dim=-1) != 1).any())


def _right_padded_lengths(mask: Tensor | None) -> Tensor | None:
    """Number of tokens of each row of a padding mask [B, S]."""
    if mask is None:
        return None
    if not torch.compiler.is_compiling() and not _is_right_padded(mask):
        raise UserError("attention_mask must have its padding on the right")
    return mask.sum(dim=-1)


def _target_lengths(mask: Tensor | None, labels: Tensor | None) -> Tensor | None:
    """Number of target tokens of each row, [B]: of a padding mask, else up to the last label."""
    if mask is not None:
        return mask.sum(dim=-1)
    if labels is None:
        return None
    return ((labels != -100).flip(-1).cumsum(-1) > 0).sum(-1)


def _cross_entropy(logits: Tensor, labels: Tensor, items: Any) -> Tensor:
    """Mean loss over labels other than -100, or the sum divided by the number of items."""
    flat, labels = logits.float().flatten(0, 1), labels.flatten().to(logits.device)
    total = functional.cross_entropy(flat, labels, reduction="sum")
    mean: Tensor = total / ((labels != -100).sum() if items is None else items)
    return mean
