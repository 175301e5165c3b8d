"""ReLUFormerLM: a decoder-only language model."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from reluformer.context_parallel import ShardedSequence
from reluformer.model.base import Model, Reports, final_norm, shared_gamma
from reluformer.model.blocks import DecoderLayer
from reluformer.model.checks import check_lengths, check_tokens
from reluformer.model.config import ModelConfig
from reluformer.model.generation import Generated, GenerationConfig, generate
from reluformer.model.kv_cache import DecoderState, GrowingCache, PagedLayerCache
from reluformer.model.positions import Start
from reluformer.model.records import DEFAULT_OPTIONS, ForwardOptions, Output, Record


class ReLUFormerLM(Model):
    """Decoder-only Transformer of the same blocks as ReLUFormer; `encoder_layers` is not used.

    Examples:
        >>> model = ReLUFormerLM(ModelConfig(vocabulary=1000, width=64, heads=4, slots=128))
        >>> logits = model(tokens).logits  # tokens [B, T], logits [B, T, 1000]
        >>> generated = model.generate(tokens, max_new_tokens=20)
    """

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
            record: What the attentions report: "row_sum", "entropy" (with the row sum), "stats" or
                "weights" (with the statistics).
            sample_rows: Record a random sample of this many query rows; None records all.
            entropy_every: Record the entropy of one block of query rows in this many.
            sequence: Sequence that is distributed over ranks. `tokens` and logits are then this
                rank's shard, and nothing can be recorded; see `reluformer.context_parallel`.

        Returns:
            Logits [B, T, vocabulary] and records.
        """
        check_tokens("tokens", tokens, self.target_embedding)
        check_lengths("lengths", lengths, tokens)
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

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        lengths: Tensor | None = None,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int = 0,
        use_cache: bool | None = None,
    ) -> Generated:
        """Continue prompts token by token, in evaluation mode.

        Args:
            tokens: Prompts [B, T], padded at the end.
            lengths: Number of tokens of each prompt, [B]; None if there is no padding.
            max_new_tokens: Maximum number of new tokens of each sequence; the end token
                `config.eos_id` ends a sequence earlier.
            temperature: 0 takes the most likely token; above 0, tokens are sampled from the
                distribution of logits / temperature.
            top_k: Sample from the k most likely tokens.
            top_p: Sample from the fewest tokens whose probabilities reach this sum.
            seed: Seed of the sampling.
            use_cache: Keep keys and values in a `PagedCache`; False computes the whole text anew
                for every token. None uses the cache where the attention supports it.

        Returns:
            Prompts with their continuations, [B, T'], and the lengths of both together, [B].

        Raises:
            UserError: An argument is out of range, or `use_cache` is not supported.
        """
        check_tokens("tokens", tokens, self.target_embedding)
        config = GenerationConfig(max_new_tokens, temperature, top_k, top_p, seed, use_cache)
        training = self.training
        self.eval()
        try:
            return generate(self, tokens, lengths, config)
        finally:
            self.train(training)

    def start(self) -> DecoderState:
        """An empty decoder state."""
        return DecoderState([GrowingCache() for _ in self.decoder])

    def decode(self, tokens: Tensor, state: DecoderState) -> Tensor:
        """Logits [rows, t, vocabulary] of the next t tokens [rows, t], which `state` then holds.

        The logits are those that `forward` computes from the whole text.
        """
        check_tokens("tokens", tokens, self.target_embedding)
        start = state.length
        state.grow(tokens)
        x = self.embed(tokens, self.target_embedding, start=start)
        for layer, cache in zip(self.decoder, state.layers, strict=True):
            x = layer(x, DEFAULT_OPTIONS, cache=cache).x
        return self.logits(self.decoder_norm(x))

    def decode_pages(
        self, tokens: Tensor, caches: Sequence[PagedLayerCache], start: Start, counts: Sequence[int]
    ) -> Tensor:
        """Logits [B, t, vocabulary] of the next t tokens [B, t], which the caches then hold.

        Args:
            tokens: Prompts, padded at the end, or one token for each sequence.
            caches: Paged cache of each layer.
            start: Position of the tokens: 0 for prompts, [B, 1] for single tokens.
            counts: Number of the tokens that each sequence stores.
        """
        x = self.embed(tokens, self.target_embedding, start=start)
        for layer, cache in zip(self.decoder, caches, strict=True):
            cache.start, cache.counts = start, counts
            x = layer(x, DEFAULT_OPTIONS, cache=cache).x
        return self.logits(self.decoder_norm(x))
