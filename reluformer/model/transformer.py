"""ReLUFormer: an encoder-decoder whose attentions and feed-forward layers are all memories."""

from typing import NamedTuple, cast

from torch import Tensor, nn

from reluformer.model.base import Model, Reports, embedding_table, final_norm, shared_gamma
from reluformer.model.blocks import DecoderLayer, EncoderLayer
from reluformer.model.checks import check_batch, check_lengths, check_tokens
from reluformer.model.config import ModelConfig
from reluformer.model.kv_cache import DecoderState, GrowingCache
from reluformer.model.records import (
    DEFAULT_OPTIONS,
    AttentionRecord,
    ForwardOptions,
    Output,
    Record,
)


class Encoded(NamedTuple):
    """Encoder output for a batch of sources."""

    hidden: Tensor
    """[B, S, width]."""
    lengths: Tensor | None
    """[B]; None if there is no padding."""
    records: tuple[AttentionRecord, ...]
    expert_choices: tuple[Tensor, ...] = ()
    """As in `Output`, for the layers of the encoder."""


class ReLUFormer(Model):
    """Encoder-decoder Transformer, by default with ReLU in place of every softmax.

    Examples:
        >>> model = ReLUFormer(ModelConfig(vocabulary=1000, width=64, heads=4, slots=128))
        >>> logits = model(source, target, source_lengths=lengths).logits
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.source_embedding = (
            self.target_embedding if config.tie_embeddings else embedding_table(config)
        )
        gamma = shared_gamma(config)
        self.encoder = nn.ModuleList(
            EncoderLayer(config, gamma) for _ in range(config.encoder_layers)
        )
        self.encoder_norm = final_norm(config)
        self.decoder = nn.ModuleList(
            DecoderLayer(config, gamma, with_source=True) for _ in range(config.decoder_layers)
        )
        self.decoder_norm = final_norm(config)

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        source_lengths: Tensor | None = None,
        target_lengths: Tensor | None = None,
        *,
        record: Record = "nothing",
        sample_rows: int | None = None,
        entropy_every: int = 1,
    ) -> Output:
        """Compute the logits of each next target token.

        Args:
            source: Source ids [B, S], padded at the end.
            target: Target ids [B, T], padded at the end.
            source_lengths: Number of source tokens that are not padding, [B].
            target_lengths: Number of target tokens that are not padding, [B].
            record: What the attentions report: "row_sum", "entropy" (with the row sum), "stats" or
                "weights" (with the statistics).
            sample_rows: Record a random sample of this many query rows; None records all.
            entropy_every: Record the entropy of one block of query rows in this many, see
                `reluformer.attention`; 1 with `sample_rows`.

        Returns:
            Logits [B, T, vocabulary] and records.
        """
        check_tokens("target", target, self.target_embedding)
        check_lengths("target_lengths", target_lengths, target)
        encoded = self.encode(
            source,
            source_lengths,
            record=record,
            sample_rows=sample_rows,
            entropy_every=entropy_every,
        )
        check_batch(source, target)
        options = ForwardOptions(target_lengths, record, sample_rows, entropy_every)
        x = self.embed(target, self.target_embedding)
        reports = Reports(encoded.records, encoded.expert_choices)
        for index, layer in enumerate(self.decoder):
            output = layer(x, options, encoded.hidden, encoded.lengths)
            x = reports.collect("decoder", index, output)
        return Output(self.logits(self.decoder_norm(x)), *reports.tuples())

    def encode(
        self,
        source: Tensor,
        source_lengths: Tensor | None = None,
        *,
        record: Record = "nothing",
        sample_rows: int | None = None,
        entropy_every: int = 1,
    ) -> Encoded:
        """Compute hidden states [B, S, width] of source [B, S]; arguments as in `forward`."""
        check_tokens("source", source, self.source_embedding)
        check_lengths("source_lengths", source_lengths, source)
        options = ForwardOptions(source_lengths, record, sample_rows, entropy_every)
        x = self.embed(source, self.source_embedding)
        reports = Reports()
        for index, layer in enumerate(self.encoder):
            x = reports.collect("encoder", index, layer(x, options, source_lengths))
        return Encoded(self.encoder_norm(x), source_lengths, *reports.tuples())

    def start(self, encoded: Encoded) -> DecoderState:
        """A decoder state with the projected source, computed once for all steps and beams.

        The rows given to `decode` are sentences times beams, for any number of beams.
        """
        layers = cast("list[DecoderLayer]", self.decoder)
        source = [layer.project_source(encoded.hidden) for layer in layers]
        return DecoderState([GrowingCache() for _ in layers], source, encoded.lengths)

    def decode(self, tokens: Tensor, state: DecoderState) -> Tensor:
        """Logits [rows, t, vocabulary] of the next t tokens [rows, t], which `state` then holds.

        The logits are those that `forward` computes from the whole target.
        """
        check_tokens("tokens", tokens, self.target_embedding)
        start = state.length
        state.grow(tokens)
        x = self.embed(tokens, self.target_embedding, start=start)
        for layer, source, cache in zip(self.decoder, state.source, state.layers, strict=True):
            x = layer(x, DEFAULT_OPTIONS, source, state.source_lengths, cache).x
        return self.logits(self.decoder_norm(x))
