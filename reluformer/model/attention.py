"""Multi-head attention: a local memory whose keys and values are other tokens."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from reluformer import context_parallel
from reluformer.errors import UserError
from reluformer.model.config import AttentionConfig, ModelConfig
from reluformer.model.gamma import Gamma
from reluformer.model.heads import (
    beams_of,
    beams_to_rows,
    merge_heads,
    rows_to_beams,
    sample_indices,
    split_heads,
    valid_rows,
)
from reluformer.model.kv_cache import GrowingCache, PagedLayerCache
from reluformer.model.memory import KeyValueMemory
from reluformer.model.positions import Start, rotate
from reluformer.model.recording import record_arguments, recorded_stats, select_rows
from reluformer.model.records import DEFAULT_OPTIONS, ForwardOptions, KeyValues
from reluformer.ops.api import attend
from reluformer.ops.call import AttentionResult, Call
from reluformer.ops.definition import Attention
from reluformer.ops.family.table import lookup
from reluformer.ops.stats import RowSums, Stats
from reluformer.ops.visibility import Visibility


class Attended(NamedTuple):
    """Result of an attention layer."""

    output: Tensor
    """[B, Tq, width]."""
    stats: Stats | RowSums | None
    """Statistics of the recorded rows, [B, H, rows] each."""
    valid: Tensor | None
    """Bool, broadcastable to [B, H, rows]: False where the query is padding."""
    weights: Tensor | None
    """Attention map [B, H, Tq, Tk], if recorded."""


class MultiHeadAttention(nn.Module):
    """Projections around the configured attention.

    The learned parameters of an attention (sinks, temperatures, gains, gates) follow from its row
    in `ATTENTIONS`; gamma and threshold of ReLU attention follow from the configuration.

    Args:
        config: Sizes of the model.
        attention: The attention of this layer.
        causal: Whether a token sees earlier tokens only.
        rotary: Whether queries and keys are rotated by their positions.
        persistent: Number of learned keys and values that every query sees beside the context.
        gamma: Gamma of the model, used if `attention.gamma` is `model`.
    """

    def __init__(
        self,
        config: ModelConfig,
        attention: AttentionConfig,
        *,
        causal: bool = False,
        rotary: bool = False,
        persistent: int = 0,
        gamma: Gamma | None = None,
    ) -> None:
        super().__init__()
        self.config, self.row = attention, lookup(attention.kind)
        self.heads, self.kv_heads = config.heads, config.key_value_heads
        self.causal, self.rotary = causal, rotary
        self.query = _projection(config.width, config.width)
        self.key_value = _projection(config.width, 2 * self.kv_heads * config.head_width)
        self.out = _projection(config.width, config.width)
        if attention.qk_norm:
            self.query_norm = nn.RMSNorm(config.head_width)
            self.key_norm = nn.RMSNorm(config.head_width)
        if attention.output_norm:
            self.output_norm = nn.RMSNorm(config.head_width)
        self.persistent: KeyValueMemory | None = None
        if persistent:
            self.persistent = KeyValueMemory(
                config.width, persistent, "persistent", heads=config.heads
            )
        if "gamma" in self.row.options:
            self.gamma = (
                gamma if attention.gamma == "model" and gamma else _gamma(config, attention)
            )
        if "threshold" in self.row.options:
            initial = torch.full((config.heads,), attention.first_threshold)
            self.threshold = nn.Parameter(initial, requires_grad=attention.threshold == "head")
        self.learned = nn.ParameterDict(_learned(self.row, config, attention.options))
        if self.row.learned.get("gate") == "token":
            self.gate = _projection(config.width, config.width)
        self.calibrating = False

    def score_gains(self) -> list[Tensor]:
        """Parameters whose common factor is a factor of every score."""
        if self.config.qk_norm:
            return [self.query_norm.weight]
        return [self.query.weight, self.query.bias]

    def project(self, context: Tensor, start: Start = 0) -> KeyValues:
        """Keys and values [B, Hkv, T, D] of a context [B, T, width] that begins at `start`."""
        keys, values = self.key_value(context).chunk(2, dim=-1)
        keys, values = split_heads(keys, self.kv_heads), split_heads(values, self.kv_heads)
        if self.config.qk_norm:
            keys = self.key_norm(keys).to(values.dtype)
        if self.rotary:
            keys = rotate(keys, start)
        return KeyValues(keys, values)

    def forward(
        self,
        x: Tensor,
        context: KeyValues | None = None,
        options: ForwardOptions = DEFAULT_OPTIONS,
        *,
        key_lengths: Tensor | None = None,
        cache: GrowingCache | PagedLayerCache | None = None,
    ) -> Attended:
        """Attend from x to a context, or to x itself.

        If x has several rows for each row of the context (beams), these become further query rows,
        and the context is not repeated.

        Args:
            x: Hidden states of the queries, [B, Tq, width].
            context: Keys and values from `project`; None for self-attention.
            options: Options of the forward pass. Row sums and entropies are recorded by
                regularisable attentions only.
            key_lengths: Number of keys that are not padding, [B].
            cache: KV cache of the tokens before x, to which x is added.
        """
        if options.sequence is not None:
            is_self = context is None and cache is None
            return self._attend_across_ranks(x, options, key_lengths, is_self)
        start: Start = 0 if cache is None else cache.start
        q = self._queries(x, start)
        if context is None:
            context = self.project(x, start)
        visible = None
        if isinstance(cache, GrowingCache):
            visible = cache.visible
            beams = 1 if visible is None else beams_of(x, visible)
            context = cache.append(KeyValues(*(beams_to_rows(t, beams) for t in context)))
        elif cache is not None:
            cache.append(context)
            if x.shape[1] == 1:
                scale = self.row.default_scale(q.shape[-1])
                rule = self.row.rectified(self._options(x, 1))
                assert rule is not None
                heads = cache.attend(q, rule, scale)
                return Attended(self._output(heads), None, None, None)
        beams = beams_of(q, context.keys)
        call = self._call(beams_to_rows(q, beams), context, visible, key_lengths)
        kind_options = self._options(x, beams)
        if self.calibrating:
            self._calibrate(call, kind_options, options.query_lengths)
        result, stats, valid = self._attend(call, kind_options, options)
        output = self._output(rows_to_beams(result.output, beams))
        return Attended(output, stats, valid, result.weights)

    @property
    def can_use_pages(self) -> bool:
        """Whether a `PagedLayerCache` can hold the keys and values of this layer."""
        rule = self.row.rectified(self.config.fixed_options)
        plain = rule is not None and rule.negative_slope == 0 and not self.row.cosine
        return plain and self.row.output_transform is None and self.persistent is None

    def _queries(self, x: Tensor, start: Start) -> Tensor:
        """Queries [B, H, T, D] of x [B, T, width]."""
        q = split_heads(self.query(x), self.heads)
        if self.config.qk_norm:
            q = self.query_norm(q).to(q.dtype)
        return rotate(q, start) if self.rotary else q

    def _output(self, heads: Tensor) -> Tensor:
        """Output of the layer [B, T, width] from the outputs of its heads [B, H, T, D]."""
        if self.config.output_norm:
            heads = self.output_norm(heads).to(heads.dtype)
        output: Tensor = self.out(merge_heads(heads))
        return output

    def _call(
        self,
        q: Tensor,
        context: KeyValues,
        visible: Tensor | None,
        key_lengths: Tensor | None,
    ) -> Call:
        """The call of q [B, H, Tq, D] to the context, with persistent slots in front of it."""
        keys, values = context
        if self.persistent is not None:
            keys, values = self.persistent.extend(keys, values)
            if key_lengths is not None:
                key_lengths = key_lengths + self.persistent.slots
            if visible is not None:
                visible = functional.pad(visible, (self.persistent.slots, 0), value=True)
        # A single new token sees all tokens before it. A length that export leaves open is causal.
        is_single = isinstance(q.shape[2], int) and q.shape[2] == 1
        causal = self.causal and visible is None and not is_single
        visibility = Visibility(mask=visible, causal=causal, key_lengths=key_lengths)
        dropout_p = self.config.dropout if self.training else 0.0
        scale = self.row.default_scale(q.shape[-1])
        return Call(q, keys, values, visibility, scale, dropout_p=dropout_p)

    def _attend(
        self, call: Call, kind_options: dict[str, Any], options: ForwardOptions
    ) -> tuple[AttentionResult, Stats | RowSums | None, Tensor | None]:
        """The result of a call, and statistics with valid rows as far as `options` record them."""
        with_map = options.record == "weights"
        impl = "auto" if with_map else self.config.impl
        sample = options.sample_rows
        extras = record_arguments(
            options.record, self.row, options.entropy_every if sample is None else 1
        )
        recording = call._replace(return_weights=with_map, **(extras if sample is None else {}))
        result = attend(self.row, recording, kind_options, impl)
        if not extras:
            return result, None, None
        stats = recorded_stats(result)
        valid = valid_rows(options.query_lengths, call.q.shape[2], call.q.device)
        if sample is not None:
            rows = sample_indices(call.q.shape[2], sample, call.q.device)
            stats = self._statistics(select_rows(call, rows), kind_options, extras)
            valid = valid[..., rows]
        return result, stats, valid

    def _attend_across_ranks(
        self, x: Tensor, options: ForwardOptions, key_lengths: Tensor | None, is_self: bool
    ) -> Attended:
        """Self-attention of this rank's shard x [B, T, width] of a distributed sequence."""
        sequence = options.sequence
        assert sequence is not None
        plain = options.record == "nothing" and not self.calibrating and self.persistent is None
        if not (is_self and plain):
            raise UserError(
                "sequence must be None with cross-attention, a cache, records, calibration or "
                "persistent slots"
            )
        start = sequence.positions(x.device)
        q = self._queries(x, start)
        heads: Tensor = context_parallel.attention(
            self.row.name,
            q,
            *self.project(x, start),
            sequence,
            causal=self.causal,
            key_lengths=key_lengths,
            dropout_p=self.config.dropout if self.training else 0.0,
            impl=self.config.impl,
            **self._options(x, 1),
        )
        return Attended(self._output(heads), None, None, None)

    def _options(self, x: Tensor, beams: int) -> dict[str, Any]:
        """Options of the attention: the fixed ones and the learned ones."""
        options = self.config.fixed_options
        options.update(self.learned.items())
        if "gamma" in self.row.options:
            options.setdefault("gamma", self.gamma())
            options.setdefault("threshold", self.threshold if self.config.thresholds else 0.0)
        if self.row.learned.get("gate") == "token":
            options["gate"] = beams_to_rows(split_heads(self.gate(x), self.heads), beams)
        return options

    def _calibrate(
        self, call: Call, kind_options: dict[str, Any], query_lengths: Tensor | None
    ) -> None:
        """Set gamma, and its value in `kind_options`, so that row sums start at the target."""
        target = self.config.row_sum_init
        if target is None or "gamma" not in self.row.options:
            return
        valid = valid_rows(query_lengths, call.q.shape[2], call.q.device)
        stats = self._statistics(call, kind_options, {"return_sums": "row_sum"})
        self.gamma.observe(stats.row_sum, valid & (stats.visible > 0), target)
        kind_options["gamma"] = self.gamma()

    def _statistics(
        self, call: Call, kind_options: dict[str, Any], extras: dict[str, Any]
    ) -> Stats | RowSums:
        """Statistics of the weights alone, without values, dropout, output norm or gate."""
        weights_only = call._replace(v=call.k[..., :0], dropout_p=0.0, **extras)
        options = {k: value for k, value in kind_options.items() if k not in ("gain", "gate")}
        stats = recorded_stats(attend(self.row, weights_only, options, "reference"))
        assert stats is not None
        return stats


def _projection(inputs: int, outputs: int) -> nn.Linear:
    linear = nn.Linear(inputs, outputs)
    nn.init.xavier_uniform_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


def _gamma(config: ModelConfig, attention: AttentionConfig) -> Gamma:
    """Gamma of one layer."""
    heads = config.heads if attention.gamma == "head" else None
    return Gamma(attention.gamma_init, heads=heads, learned=attention.gamma != "fixed")


def _learned(row: Attention, config: ModelConfig, fixed: dict[str, Any]) -> dict[str, nn.Parameter]:
    """Learned options of an attention, each at its neutral or default value."""
    shapes = {"head": (config.heads,), "width": (config.width,), "pair": (2,)}
    neutral = {"gain": 1.0, "gate": 0.0, "mix": 1.0}
    parameters = {}
    for name, shape in row.learned.items():
        if shape == "token" or name in fixed or name in ("gamma", "threshold"):
            continue
        initial = neutral[name] if name in neutral else float(row.defaults[name])
        parameters[name] = nn.Parameter(torch.full(shapes[shape], initial))
    return parameters
