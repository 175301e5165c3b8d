"""Multi-head attention: a local memory whose keys and values are other tokens."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from reluformer import context_parallel
from reluformer.context_parallel import ShardedSequence
from reluformer.errors import UserError
from reluformer.model.config import AttentionConfig, ModelConfig
from reluformer.model.gamma import Gamma
from reluformer.model.kv_cache import GrowingCache
from reluformer.model.memory import KeyValueMemory
from reluformer.model.positions import Start, rotate
from reluformer.model.records import KeyValues, Record
from reluformer.ops.api import attend
from reluformer.ops.backends.registry import BACKENDS, choose
from reluformer.ops.call import AttentionResult, Call
from reluformer.ops.definition import Attention
from reluformer.ops.family.table import lookup
from reluformer.ops.stats import RowSums, Stats
from reluformer.ops.visibility import Visibility


class Attended(NamedTuple):
    """Output [B, Tq, width], with statistics and maps where they were asked for."""

    output: Tensor
    stats: Stats | RowSums | None
    valid: Tensor | None
    """Bool, broadcastable to the statistics' [B, H, rows]: False where the query is padding."""
    weights: Tensor | None


class MultiHeadAttention(nn.Module):
    """Project, attend with the configured kind, project back.

    The learned quantities of a kind (sinks, temperatures, gains, gates) come from its row in the
    table; gamma and threshold of ReLU attention from the configuration. `persistent` slots are
    learned keys and values that every row sees beside the context.
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
                gamma
                if attention.gamma == "model" and gamma
                else Gamma(
                    attention.gamma_init,
                    heads=config.heads if attention.gamma == "head" else None,
                    learned=attention.gamma != "fixed",
                )
            )
        if "threshold" in self.row.options:
            start = torch.full((config.heads,), attention.first_threshold)
            self.threshold = nn.Parameter(start, requires_grad=attention.threshold == "head")
        self.learned = nn.ParameterDict(_learned(self.row, config, attention.options))
        if self.row.learned.get("gate") == "token":
            self.gate = _projection(config.width, config.width)
        self.calibrating = False

    def score_gains(self) -> list[Tensor]:
        """Parameters in which, taken together, every score is linear."""
        if self.config.qk_norm:
            return [self.query_norm.weight]
        return [self.query.weight, self.query.bias]

    def project(self, context: Tensor, start: Start = 0) -> KeyValues:
        """Keys and values [B, Hkv, T, D] of a context [B, T, width] that begins at `start`."""
        keys, values = self.key_value(context).chunk(2, dim=-1)
        keys, values = _split(keys, self.kv_heads), _split(values, self.kv_heads)
        if self.config.qk_norm:
            keys = self.key_norm(keys).to(values.dtype)
        if self.rotary:
            keys = rotate(keys, start)
        return KeyValues(keys, values)

    def forward(
        self,
        x: Tensor,
        context: KeyValues | None = None,
        *,
        query_lengths: Tensor | None = None,
        key_lengths: Tensor | None = None,
        cache: GrowingCache | None = None,
        record: Record = "nothing",
        sample_rows: int | None = None,
        entropy_every: int = 1,
        sequence: ShardedSequence | None = None,
    ) -> Attended:
        """Attend from x [B, Tq, width] to a projected context, or to x itself when it is None.

        A cache holds the earlier tokens of x. Where x has several rows for each sentence of the
        context (beams), they are read as further query rows and the context is not repeated.
        With `record`, statistics cover all query rows or a random sample of `sample_rows`; row sums
        and entropies alone are reported by regularisable kinds only, and of all rows the entropies
        alone can be those of one block in `entropy_every`. With `sequence`, x is this
        rank's shard of one that several ranks share.
        """
        start: Start = 0 if cache is None else cache.start
        visible = None if cache is None else cache.visible
        if sequence is not None:
            self._check_shared(context is None and cache is None, record)
            start = sequence.positions(x.device)
        q = _split(self.query(x), self.heads)
        if self.config.qk_norm:
            q = self.query_norm(q).to(q.dtype)
        if self.rotary:
            q = rotate(q, start)
        if context is None:
            context = self.project(x, start)
            if cache is not None:
                beams = 1 if visible is None else x.shape[0] // visible.shape[0]
                context = cache.append(KeyValues(*(_beams_to_rows(t, beams) for t in context)))
        if sequence is not None:
            heads = self._across_ranks(q, context, sequence, key_lengths, self._options(x, 1))
            return Attended(self._leave(heads), None, None, None)
        keys, values = context
        beams = q.shape[0] // keys.shape[0]
        q = _beams_to_rows(q, beams)
        if self.persistent is not None:
            keys, values = self.persistent.extend(keys, values)
            if key_lengths is not None:
                key_lengths = key_lengths + self.persistent.slots
            if visible is not None:
                visible = functional.pad(visible, (self.persistent.slots, 0), value=True)
        # One new token sees all that came before it.
        causal = self.causal and visible is None and q.shape[2] > 1
        visibility = Visibility(mask=visible, causal=causal, key_lengths=key_lengths)
        options = self._options(x, beams)
        if self.calibrating:
            self._calibrate(q, keys, visibility, options, query_lengths)
        with_map = record == "weights"
        extras = _extras(record, self.row, entropy_every if sample_rows is None else 1)
        call = Call(
            q,
            keys,
            values,
            visibility,
            self.row.default_scale(q.shape[-1]),
            dropout_p=self.config.dropout if self.training else 0.0,
            return_weights=with_map,
            **(extras if sample_rows is None else {}),
        )
        result = attend(self.row, call, options, "auto" if with_map else self.config.impl)
        stats, valid = _either(result), None
        if extras:
            valid = _valid_rows(query_lengths, q.shape[2], q.device)
            if sample_rows is not None:
                rows = _sample(q.shape[2], sample_rows, q.device)
                stats = self._of_rows(rows, q, keys, visibility, options, extras)
                valid = valid[..., rows]
        output = self._leave(_rows_to_beams(result.output, beams))
        return Attended(output, stats, valid, result.weights)

    def _leave(self, heads: Tensor) -> Tensor:
        """The layer's output [B, T, width] from what its heads read, [B, H, T, D]."""
        if self.config.output_norm:
            heads = self.output_norm(heads).to(heads.dtype)
        output: Tensor = self.out(_merge(heads))
        return output

    def _check_shared(self, plain: bool, record: Record) -> None:
        if not plain or record != "nothing" or self.calibrating or self.persistent is not None:
            raise UserError(
                "a sequence that ranks share takes self-attention without a cache, records, "
                "calibration and persistent slots"
            )

    def _across_ranks(
        self,
        q: Tensor,
        context: KeyValues,
        sequence: ShardedSequence,
        key_lengths: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        """What the heads read, [B, H, T, D], of this rank's tokens."""
        heads: Tensor = context_parallel.attention(
            self.row.name,
            q,
            *context,
            sequence,
            causal=self.causal,
            key_lengths=key_lengths,
            dropout_p=self.config.dropout if self.training else 0.0,
            impl=self.config.impl,
            **options,
        )
        return heads

    def _options(self, x: Tensor, beams: int) -> dict[str, Any]:
        """The options of this attention's kind: fixed ones, then what the layer has learned."""
        options = self.config.fixed_options
        options.update(self.learned.items())
        if "gamma" in self.row.options:
            options.setdefault("gamma", self.gamma())
            options.setdefault("threshold", self.threshold if self.config.thresholds else 0.0)
        if self.row.learned.get("gate") == "token":
            options["gate"] = _beams_to_rows(_split(self.gate(x), self.heads), beams)
        return options

    def _calibrate(
        self,
        q: Tensor,
        keys: Tensor,
        visibility: Visibility,
        options: dict[str, Any],
        query_lengths: Tensor | None,
    ) -> None:
        target = self.config.row_sum_init
        if target is None or "gamma" not in self.row.options:
            return
        valid = _valid_rows(query_lengths, q.shape[2], q.device)
        stats = self._statistics(q, keys, visibility, options, {"return_sums": "row_sum"})
        self.gamma.observe(stats.row_sum, valid & (stats.visible > 0), target)
        options["gamma"] = self.gamma()

    def _of_rows(
        self,
        rows: Tensor,
        q: Tensor,
        keys: Tensor,
        visibility: Visibility,
        options: dict[str, Any],
        extras: dict[str, Any],
    ) -> Stats | RowSums:
        """Statistics of some of the query rows, given by their numbers."""
        visible = visibility.table(q.shape[2], keys.shape[2], q.device)
        if visible is not None and visible.shape[-2] > 1:
            visible = visible[..., rows, :]
        return self._statistics(q[:, :, rows], keys, Visibility(mask=visible), options, extras)

    def _statistics(
        self,
        q: Tensor,
        keys: Tensor,
        visibility: Visibility,
        options: dict[str, Any],
        extras: dict[str, Any],
    ) -> Stats | RowSums:
        """What `extras` ask for, of the weights alone: no values, no output norm or gate."""
        no_values = keys[..., :0]
        kept = {name: value for name, value in options.items() if name not in ("gain", "gate")}
        scale = self.row.default_scale(q.shape[-1])
        call = Call(q, keys, no_values, visibility, scale, **extras)
        result = attend(self.row, call, kept, "reference")
        stats = _either(result)
        assert stats is not None
        return stats


def opaque(
    config: ModelConfig, attention: AttentionConfig, record: Record, device: torch.device
) -> bool:
    """Whether compilers see one operator in place of this attention and of what it records."""
    row, width = lookup(attention.kind), config.head_width
    q, k = (
        torch.empty(1, heads, 2, width, dtype=torch.float32, device=device)
        for heads in (config.heads, config.key_value_heads)
    )
    call = Call(q, k, k, Visibility(), row.default_scale(width), **_extras(record, row))
    rule = row.rectified(attention.fixed_options)
    return BACKENDS[choose(row, call, rule, attention.impl)].opaque


def _extras(record: Record, row: Attention, entropy_every: int = 1) -> dict[str, Any]:
    """The arguments that make an attention return what is recorded, but for maps."""
    if record == "row_sum" or record == "entropy":
        sums = {"return_sums": record, "entropy_every": entropy_every}
        return sums if row.regularisable else {}
    return {} if record == "nothing" else {"return_stats": True}


def _either(result: AttentionResult) -> Stats | RowSums | None:
    """What a call with such arguments returned."""
    return result.stats if result.sums is None else result.sums


def _sample(rows: int, count: int, device: torch.device) -> Tensor:
    """Numbers of `count` random rows, [count], or of all if there are fewer."""
    # `randperm` cannot be recorded in a CUDA graph; sorting random numbers can.
    return torch.rand(rows, device=device).argsort()[:count]


def _projection(inputs: int, outputs: int) -> nn.Linear:
    linear = nn.Linear(inputs, outputs)
    nn.init.xavier_uniform_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


def _learned(row: Attention, config: ModelConfig, fixed: dict[str, Any]) -> dict[str, nn.Parameter]:
    """Parameters for what the table says a kind learns, at the neutral default of each option."""
    shapes = {"head": (config.heads,), "width": (config.width,), "pair": (2,)}
    neutral = {"gain": 1.0, "gate": 0.0, "mix": 1.0}
    parameters = {}
    for name, shape in row.learned.items():
        if shape == "token" or name in fixed or name in ("gamma", "threshold"):
            continue
        start = neutral[name] if name in neutral else float(row.defaults[name])
        parameters[name] = nn.Parameter(torch.full(shapes[shape], start))
    return parameters


def _split(features: Tensor, heads: int) -> Tensor:
    """[B, T, heads * D] as [B, heads, T, D]."""
    batch, length, width = features.shape
    return features.view(batch, length, heads, width // heads).transpose(1, 2)


def _merge(heads: Tensor) -> Tensor:
    """[B, heads, T, D] as [B, T, heads * D]."""
    return heads.transpose(1, 2).flatten(2)


def _beams_to_rows(q: Tensor, beams: int) -> Tensor:
    """[B * beams, H, T, D] as [B, H, beams * T, D]: the beams of a sentence share its context."""
    if beams == 1:
        return q
    rows, heads, length, width = q.shape
    beams_first = q.view(rows // beams, beams, heads, length, width)
    return beams_first.transpose(1, 2).reshape(rows // beams, heads, beams * length, width)


def _rows_to_beams(output: Tensor, beams: int) -> Tensor:
    """[B, H, beams * T, D] as [B * beams, H, T, D]."""
    if beams == 1:
        return output
    batch, heads, rows, width = output.shape
    by_beam = output.reshape(batch, heads, beams, rows // beams, width)
    return by_beam.transpose(1, 2).reshape(batch * beams, heads, rows // beams, width)


def _valid_rows(lengths: Tensor | None, rows: int, device: torch.device) -> Tensor:
    """Bool [B or 1, 1, rows]: True where a query is a token and not padding."""
    if lengths is None:
        return torch.ones(1, 1, rows, dtype=torch.bool, device=device)
    return torch.arange(rows, device=device) < lengths.to(device).view(-1, 1, 1)
