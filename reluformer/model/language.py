"""ReLUFormerLM: a decoder-only language model."""

from torch import Tensor, nn

from reluformer.context_parallel import ShardedSequence
from reluformer.model.base import Model, Reports, final_norm, shared_gamma
from reluformer.model.blocks import DecoderLayer, ForwardOptions
from reluformer.model.config import ModelConfig
from reluformer.model.kv_cache import DecoderState, GrowingCache
from reluformer.model.positions import Start
from reluformer.model.records import Output, Record


class ReLUFormerLM(Model):
    """Decoder-only Transformer of the same blocks as ReLUFormer; `encoder_layers` is not used."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        gamma = shared_gamma(config)
        self.decoder = nn.ModuleList(
            DecoderLayer(config, gamma, with_source=False) for _ in range(config.decoder_layers)
        )
        self.decoder_norm = final_norm(config)

    def forward(
        self,
        tokens: Tensor,
        lengths: Tensor | None = None,
        *,
        record: Record = "nothing",
        sample_rows: int | None = None,
        entropy_every: int = 1,
        sequence: ShardedSequence | None = None,
    ) -> Output:
        """Compute the logits of each next token.

        Args:
            tokens: Token ids [B, T], padded at the end.
            lengths: Number of tokens that are not padding, [B]; None if there is no padding.
            record: What the attentions report.
            sample_rows: Record a random sample of this many query rows; None records all.
            entropy_every: Record the entropy of one block of query rows in this many.
            sequence: Sequence that is distributed over ranks. `tokens` and logits are then this
                rank's shard, and nothing can be recorded; see `reluformer.context_parallel`.

        Returns:
            Logits [B, T, vocabulary] and records.
        """
        options = ForwardOptions(lengths, record, sample_rows, entropy_every, sequence)
        start: Start = 0
        if sequence is not None:
            sequence.check(tokens, 1, "tokens")
            start = sequence.positions(tokens.device)
        x = self.embed(tokens, self.target_embedding, start)
        reports = Reports()
        for index, layer in enumerate(self.decoder):
            x = reports.collect("decoder", index, layer(x, options))
        return Output(self.logits(self.decoder_norm(x)), *reports.tuples())

    def start(self) -> DecoderState:
        """An empty decoder state."""
        return DecoderState([GrowingCache() for _ in self.decoder])

    def decode(self, tokens: Tensor, state: DecoderState) -> Tensor:
        """Logits [rows, t, vocabulary] of the next t tokens [rows, t], which `state` then holds.

        The logits are those that `forward` computes from the whole text.
        """
        start = state.length
        state.grow(tokens)
        x = self.embed(tokens, self.target_embedding, start=start)
        for layer, cache in zip(self.decoder, state.layers, strict=True):
            x = layer(x, ForwardOptions(), cache=cache).x
        return self.logits(self.decoder_norm(x))
