"""The blocks both models are built of: a residual branch, an encoder layer, a decoder layer."""

from typing import NamedTuple, cast

from torch import Tensor, nn

from reluformer.context_parallel import ShardedSequence
from reluformer.model.attention import Attended, MultiHeadAttention
from reluformer.model.config import ModelConfig
from reluformer.model.gamma import Gamma
from reluformer.model.kv_cache import GrowingCache
from reluformer.model.memory import KeyValueMemory
from reluformer.model.records import KeyValues, Record


class ForwardOptions(NamedTuple):
    """What every layer of a pass is told: the lengths [B] of its queries, and what to report.

    With a `sequence` the pass sees this rank's tokens of it only.
    """

    query_lengths: Tensor | None = None
    record: Record = "nothing"
    sample_rows: int | None = None
    entropy_every: int = 1
    sequence: ShardedSequence | None = None


class Residual(nn.Module):
    """x + branch(norm(x)) (pre-norm) or norm(x + branch(x)) (post-norm), with dropout."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.pre = config.norm == "pre"
        self.norm = nn.LayerNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)

    def enter(self, x: Tensor) -> Tensor:
        """What the branch reads, from x [B, T, width]."""
        entered: Tensor = self.norm(x) if self.pre else x
        return entered

    def leave(self, x: Tensor, branch: Tensor) -> Tensor:
        """x with the branch's output [B, T, width] added."""
        mixed: Tensor = x + self.dropout(branch)
        return mixed if self.pre else cast("Tensor", self.norm(mixed))


class AttentionBranch(nn.Module):
    """An attention inside a residual connection."""

    def __init__(self, config: ModelConfig, attention: MultiHeadAttention) -> None:
        super().__init__()
        self.attention = attention
        self.residual = Residual(config)

    def forward(
        self,
        x: Tensor,
        options: ForwardOptions,
        context: KeyValues | None = None,
        key_lengths: Tensor | None = None,
        cache: GrowingCache | None = None,
    ) -> tuple[Tensor, Attended]:
        """x [B, T, width] after the branch, and what the attention reports."""
        report = self.attention(
            self.residual.enter(x),
            context,
            query_lengths=options.query_lengths,
            key_lengths=key_lengths,
            cache=cache,
            record=options.record,
            sample_rows=options.sample_rows,
            entropy_every=options.entropy_every,
            sequence=options.sequence,
        )
        return self.residual.leave(x, report.output), report


class MemoryBranch(nn.Module):
    """A feed-forward memory inside a residual connection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.memory = KeyValueMemory(
            config.width, config.slots, config.memory, **config.memory_options
        )
        self.residual = Residual(config)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, width] after the branch."""
        return self.residual.leave(x, self.memory(self.residual.enter(x)))


class EncoderLayer(nn.Module):
    """Self-attention over the whole input, then a memory."""

    def __init__(self, config: ModelConfig, gamma: Gamma | None) -> None:
        super().__init__()
        self.self_attention = _self_attention(config, "encoder", gamma)
        self.memory = _memory(config)

    def forward(
        self, x: Tensor, options: ForwardOptions, key_lengths: Tensor | None = None
    ) -> tuple[Tensor, Attended]:
        """x [B, S, width] after the layer, and what its attention reports."""
        x, report = self.self_attention(x, options, key_lengths=key_lengths)
        return self.memory(x), report


class DecoderLayer(nn.Module):
    """Causal self-attention, attention to the source where there is one, then a memory."""

    def __init__(self, config: ModelConfig, gamma: Gamma | None, with_source: bool) -> None:
        super().__init__()
        self.self_attention = _self_attention(config, "decoder", gamma)
        self.cross_attention: AttentionBranch | None = None
        if with_source:
            attention = MultiHeadAttention(config, config.attention_at("cross"), gamma=gamma)
            self.cross_attention = AttentionBranch(config, attention)
        self.memory = _memory(config)

    def forward(
        self,
        x: Tensor,
        options: ForwardOptions,
        source: Tensor | KeyValues | None = None,
        source_lengths: Tensor | None = None,
        cache: GrowingCache | None = None,
    ) -> tuple[Tensor, Attended, Attended | None]:
        """x [B, T, width] after the layer, and what its one or two attentions report.

        The source is hidden states [B, S, width], or their keys and values from `project_source`.
        """
        x, own = self.self_attention(x, options, cache=cache)
        cross = None
        if self.cross_attention is not None:
            if isinstance(source, Tensor):
                source = self.project_source(source)
            x, cross = self.cross_attention(x, options, source, source_lengths)
        return self.memory(x), own, cross

    def project_source(self, hidden: Tensor) -> KeyValues:
        """Keys and values of hidden states [B, S, width] for this layer's cross-attention."""
        assert self.cross_attention is not None
        return self.cross_attention.attention.project(hidden)


def _self_attention(config: ModelConfig, site: str, gamma: Gamma | None) -> AttentionBranch:
    attention = MultiHeadAttention(
        config,
        config.attention_at("decoder" if site == "decoder" else "encoder"),
        causal=site == "decoder",
        rotary=config.positions == "rotary",
        persistent=config.slots if config.memory == "persistent" else 0,
        gamma=gamma,
    )
    return AttentionBranch(config, attention)


def _memory(config: ModelConfig) -> nn.Module:
    # Persistent slots live inside the self-attentions and leave no feed-forward layer.
    return nn.Identity() if config.memory == "persistent" else MemoryBranch(config)
