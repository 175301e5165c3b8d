"""ReLUFormer: an encoder-decoder whose attentions and feed-forward layers are all memories."""

from typing import NamedTuple, cast

from torch import Tensor, nn

from reluformer.model.base import Model, as_records, embedding_table, final_norm, shared_gamma
from reluformer.model.blocks import DecoderLayer, EncoderLayer, ForwardOptions
from reluformer.model.config import ModelConfig
from reluformer.model.kv_cache import DecoderState, GrowingCache
from reluformer.model.records import AttentionRecord, Output, Record


class Encoded(NamedTuple):
    """The encoder's view of a batch of sources."""

    hidden: Tensor
    """[B, S, width]."""
    lengths: Tensor | None
    """[B], None when nothing is padding."""
    records: tuple[AttentionRecord, ...]


class ReLUFormer(Model):
    """Encoder-decoder Transformer, by default with ReLU in place of every softmax.

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
        """Logits [B, T, vocabulary] of each next token of target [B, T], given source [B, S].

        Sources and targets are padded at their end; lengths are [B]. `record` asks for records of
        every attention, of all query rows or of a random sample of `sample_rows`; of all rows, the
        entropies alone can be those of one block in `entropy_every`, see `reluformer.attention`.
        """
        encoded = self.encode(
            source,
            source_lengths,
            record=record,
            sample_rows=sample_rows,
            entropy_every=entropy_every,
        )
        options = ForwardOptions(target_lengths, record, sample_rows, entropy_every)
        x = self.embed(target, self.target_embedding)
        records = list(encoded.records)
        for index, layer in enumerate(self.decoder):
            x, own, cross = layer(x, options, encoded.hidden, encoded.lengths)
            records += [*as_records("decoder", index, own), *as_records("cross", index, cross)]
        return Output(self.logits(self.decoder_norm(x)), tuple(records))

    def encode(
        self,
        source: Tensor,
        source_lengths: Tensor | None = None,
        *,
        record: Record = "nothing",
        sample_rows: int | None = None,
        entropy_every: int = 1,
    ) -> Encoded:
        """Hidden states [B, S, width] of source [B, S]."""
        options = ForwardOptions(source_lengths, record, sample_rows, entropy_every)
        x = self.embed(source, self.source_embedding)
        records: list[AttentionRecord] = []
        for index, layer in enumerate(self.encoder):
            x, report = layer(x, options, source_lengths)
            records += as_records("encoder", index, report)
        return Encoded(self.encoder_norm(x), source_lengths, tuple(records))

    def start(self, encoded: Encoded) -> DecoderState:
        """A decoder state with the source's keys and values, computed once for all steps and beams.

        Rows given to `decode` are sentences times beams, for any number of beams.
        """
        layers = cast("list[DecoderLayer]", self.decoder)
        source = [layer.project_source(encoded.hidden) for layer in layers]
        return DecoderState([GrowingCache() for _ in layers], source, encoded.lengths)

    def decode(self, tokens: Tensor, state: DecoderState) -> Tensor:
        """Logits [rows, t, vocabulary] after the next t tokens [rows, t]; the state remembers them.

        Equal, token by token, to the logits that `forward` gives for the whole target.
        """
        start = state.length
        state.grow(tokens)
        x = self.embed(tokens, self.target_embedding, start=start)
        for layer, source, cache in zip(self.decoder, state.source, state.layers, strict=True):
            x, _, _ = layer(x, ForwardOptions(), source, state.source_lengths, cache)
        return self.logits(self.decoder_norm(x))
