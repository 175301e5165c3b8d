"""Building blocks of both models: residual branches, encoder layer, decoder layer."""

from typing import NamedTuple, cast

from torch import Tensor, nn

from reluformer.model.attention import Attended, MultiHeadAttention
from reluformer.model.config import ModelConfig, Site
from reluformer.model.gamma import Gamma
from reluformer.model.kv_cache import LayerCache
from reluformer.model.memory import KeyValueMemory
from reluformer.model.records import ForwardOptions, KeyValues


class LayerOutput(NamedTuple):
    """Result of one layer."""

    x: Tensor
    """[B, T, width]."""
    self_attention: Attended
    cross_attention: Attended | None
    """None in an encoder layer and in a language model."""
    expert_choices: Tensor | None
    """`KeyValueMemory.expert_choices` [B, experts]; None without experts or in evaluation mode."""


class Residual(nn.Module):
    """x + branch(norm(x)) (pre-norm) or norm(x + branch(x)) (post-norm), with dropout."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.pre = config.norm == "pre"
        self.norm = nn.LayerNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)

    def enter(self, x: Tensor) -> Tensor:
        """Input of the branch from x [B, T, width]."""
        entered: Tensor = self.norm(x) if self.pre else x
        return entered

    def leave(self, x: Tensor, branch: Tensor) -> Tensor:
        """Sum of x and the output of the branch, [B, T, width] each."""
        mixed: Tensor = x + self.dropout(branch)
        return mixed if self.pre else cast("Tensor", self.norm(mixed))


class AttentionBranch(nn.Module):
    """Attention with a residual connection."""

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
        cache: LayerCache | None = None,
    ) -> tuple[Tensor, Attended]:
        """x [B, T, width] after the branch, and the report of the attention."""
        report = self.attention(
            self.residual.enter(x), context, options, key_lengths=key_lengths, cache=cache
        )
        return self.residual.leave(x, report.output), report


class MemoryBranch(nn.Module):
    """Feed-forward memory with a residual connection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.memory = KeyValueMemory(
            config.width, config.slots, config.memory, **config.memory_options
        )
        self.residual = Residual(config)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """x [B, T, width] after the branch, and in training the choices of experts, if any.

        Padding past `lengths` [B] does not count as a choice.
        """
        entered = self.residual.enter(x)
        choices = self.memory.expert_choices(entered, lengths) if self.training else None
        return self.residual.leave(x, self.memory(entered)), choices


class EncoderLayer(nn.Module):
    """Self-attention over the whole input, then a memory."""

    def __init__(self, config: ModelConfig, gamma: Gamma | None) -> None:
        super().__init__()
        self.self_attention = _self_attention(config, "encoder", gamma)
        self.memory = _memory(config)

    def forward(
        self, x: Tensor, options: ForwardOptions, key_lengths: Tensor | None = None
    ) -> LayerOutput:
        """x [B, S, width] after the layer, with reports; `key_lengths` [B] excludes padding."""
        x, report = self.self_attention(x, options, key_lengths=key_lengths)
        choices = None
        if self.memory is not None:
            x, choices = self.memory(x, options.query_lengths)
        return LayerOutput(x, report, None, choices)


class DecoderLayer(nn.Module):
    """Causal self-attention, cross-attention in an encoder-decoder, then a memory."""

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
        cache: LayerCache | None = None,
    ) -> LayerOutput:
        """x [B, T, width] after the layer, with reports.

        Args:
            x: Hidden states of the target tokens.
            options: Options of the forward pass.
            source: Hidden states [B, S, width] of the source, or their keys and values from
                `project_source`.
            source_lengths: Number of source tokens that are not padding, [B].
            cache: KV cache of the earlier target tokens.
        """
        x, report = self.self_attention(x, options, cache=cache)
        cross = choices = None
        if self.cross_attention is not None:
            if isinstance(source, Tensor):
                source = self.project_source(source)
            x, cross = self.cross_attention(x, options, source, source_lengths)
        if self.memory is not None:
            x, choices = self.memory(x, options.query_lengths)
        return LayerOutput(x, report, cross, choices)

    def project_source(self, hidden: Tensor) -> KeyValues:
        """Keys and values of hidden states [B, S, width] for this layer's cross-attention."""
        assert self.cross_attention is not None
        return self.cross_attention.attention.project(hidden)


def _self_attention(config: ModelConfig, site: Site, gamma: Gamma | None) -> AttentionBranch:
    attention = MultiHeadAttention(
        config,
        config.attention_at(site),
        causal=site == "decoder",
        rotary=config.positions == "rotary",
        persistent=config.slots if config.memory == "persistent" else 0,
        gamma=gamma,
    )
    return AttentionBranch(config, attention)


def _memory(config: ModelConfig) -> MemoryBranch | None:
    # Persistent slots are part of the self-attentions and replace the feed-forward layer.
    return None if config.memory == "persistent" else MemoryBranch(config)
