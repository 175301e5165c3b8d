"""ReLUFormerLM: the decoder alone, as a language model."""

from torch import Tensor, nn

from reluformer.context_parallel import ShardedSequence
from reluformer.model.base import Model, as_records, final_norm, shared_gamma
from reluformer.model.blocks import DecoderLayer, ForwardOptions
from reluformer.model.config import ModelConfig
from reluformer.model.kv_cache import DecoderState, GrowingCache
from reluformer.model.positions import Start
from reluformer.model.records import AttentionRecord, Output, Record


class ReLUFormerLM(Model):
    """Decoder-only Transformer of the same blocks; `encoder_layers` is not used."""

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
        """Logits [B, T, vocabulary] of each next token of tokens [B, T], padded at their end.

        With a `sequence` that several ranks share, tokens are this rank's shard of it, and so are
        the logits; nothing can be recorded then (see `reluformer.context_parallel`).
        """
        options = ForwardOptions(lengths, record, sample_rows, entropy_every, sequence)
        start: Start = 0
        if sequence is not None:
            sequence.check(tokens, 1, "tokens")
            start = sequence.positions(tokens.device)
        x = self.embed(tokens, self.target_embedding, start)
        records: list[AttentionRecord] = []
        for index, layer in enumerate(self.decoder):
            x, own, _ = layer(x, options)
            records += as_records("decoder", index, own)
        return Output(self.logits(self.decoder_norm(x)), tuple(records))

    def start(self) -> DecoderState:
        """An empty decoder state."""
        return DecoderState([GrowingCache() for _ in self.decoder])

    def decode(self, tokens: Tensor, state: DecoderState) -> Tensor:
        """Logits [rows, t, vocabulary] after the next t tokens [rows, t]; the state remembers them.

        Equal, token by token, to the logits that `forward` gives for the whole text.
        """
        start = state.length
        state.grow(tokens)
        x = self.embed(tokens, self.target_embedding, start=start)
        for layer, cache in zip(self.decoder, state.layers, strict=True):
            x, _, _ = layer(x, ForwardOptions(), cache=cache)
        return self.logits(self.decoder_norm(x))
