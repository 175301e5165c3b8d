"""A model's parameters as the structures that the native library reads."""

import math
from collections.abc import Callable
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn

from reluformer.model import ReLUFormer
from reluformer.model.attention import MultiHeadAttention
from reluformer.model.blocks import AttentionBranch, DecoderLayer, EncoderLayer, MemoryBranch
from reluformer.model.int8_files import Parameter
from reluformer.translation.native import layout
from reluformer.translation.native.support import MEMORY_POWERS
from reluformer.translation.native.tables import PackedTables

Lookup: TypeAlias = Callable[[str], Parameter]
"""Function from the name of a parameter to its value."""


class Describer:
    """Packs the tables of a model and describes it; owns the memory that the description points to.

    Args:
        skeleton: The model; only names, shapes and settings are used.
        lookup: Values of its parameters by name. Each table is looked up once.
        tables: Receives the tables of weights.
    """

    def __init__(self, skeleton: ReLUFormer, lookup: Lookup, tables: PackedTables) -> None:
        self.model, self.lookup, self.tables = skeleton, lookup, tables
        self.owned: list[object] = []

    def describe(self) -> layout.Model:
        """The description of the model, valid as long as this object."""
        config = self.model.config
        target = self.tables.pack(self.lookup("target_embedding.weight"))
        tied = config.tie_embeddings
        encoder, decoder = (
            (layout.Layer * len(stack))(*map(self._layer, names, stack))
            for stack, names in (
                (self.model.encoder, [f"encoder.{i}" for i in range(config.encoder_layers)]),
                (self.model.decoder, [f"decoder.{i}" for i in range(config.decoder_layers)]),
            )
        )
        self.owned += [encoder, decoder]
        width, head_width = config.width, config.head_width
        is_rotary = config.positions == "rotary"
        return layout.Model(
            source_embedding=target if tied else self._untied("source_embedding"),
            target_embedding=target,
            output=target if tied else self._untied("output"),
            encoder=encoder,
            decoder=decoder,
            encoder_norm=self._norm("encoder_norm", self.model.encoder_norm),
            decoder_norm=self._norm("decoder_norm", self.model.decoder_norm),
            sinusoid_rates=0 if is_rotary else self._numbers(_sinusoid_rates(width)),
            rotary_rates=self._numbers(_rotary_rates(head_width)) if is_rotary else 0,
            vocabulary=config.vocabulary,
            width=width,
            heads=config.heads,
            key_heads=config.key_value_heads,
            head_width=head_width,
            slots=config.slots,
            encoder_layers=config.encoder_layers,
            decoder_layers=config.decoder_layers,
            is_pre_norm=config.norm == "pre",
            bos=config.bos_id,
            eos=config.eos_id,
        )

    def _layer(self, name: str, module: nn.Module) -> layout.Layer:
        layer = cast("EncoderLayer | DecoderLayer", module)
        own, memory = layer.self_attention, layer.memory
        cross = layer.cross_attention if isinstance(layer, DecoderLayer) else None
        assert memory is not None
        described = layout.Layer(
            memory=self._memory(f"{name}.memory", memory),
            memory_norm=self._norm(f"{name}.memory.residual.norm", memory.residual.norm),
        )
        for field, branch in (("self", own), ("cross", cross)):
            if branch is not None:
                prefix = f"{name}.{field}_attention"
                setattr(described, field, self._attention(prefix, branch))
                norm = self._norm(f"{prefix}.residual.norm", branch.residual.norm)
                setattr(described, f"{field}_norm", norm)
        return described

    def _attention(self, name: str, branch: AttentionBranch) -> layout.Attention:
        name, attention = f"{name}.attention", branch.attention
        config = attention.config
        described = layout.Attention(
            query=self._linear(f"{name}.query"),
            key_value=self._linear(f"{name}.key_value"),
            out=self._linear(f"{name}.out"),
            scale=attention.row.default_scale(attention.query.out_features // attention.heads),
        )
        if config.qk_norm:
            described.query_norm = self._norm(f"{name}.query_norm", attention.query_norm)
            described.key_norm = self._norm(f"{name}.key_norm", attention.key_norm)
        if config.output_norm:
            described.head_norm = self._norm(f"{name}.output_norm", attention.output_norm)
        self._rule(described, name, attention)
        return described

    def _rule(self, to: layout.Attention, name: str, attention: MultiHeadAttention) -> None:
        """Fill in the function from scores to weights; softmax has power 0."""
        config = attention.config
        options = config.fixed_options
        if "gamma" in attention.row.options:
            gamma = self._vector(f"{name}.gamma.log_gamma").exp()
            options["gamma"] = gamma.expand(attention.heads)
            if config.thresholds:
                options["threshold"] = self._vector(f"{name}.threshold")
        rule = attention.row.rectified(options)
        if rule is None:
            return
        heads = torch.ones(attention.heads, dtype=torch.float32, device="cpu")
        to.power, to.exponent = rule.power, rule.length_exponent
        to.row_normalise = rule.row_normalise or 0.0
        to.offset = self._numbers(-heads * rule.threshold)
        to.factor = self._numbers(heads * 2**rule.length_exponent / rule.gamma)

    def _memory(self, name: str, branch: MemoryBranch) -> layout.Memory:
        name, memory = f"{name}.memory", branch.memory
        keys_bias, values_bias = (
            self._vector(f"{name}.{part}_bias") if memory.bias else None
            for part in ("keys", "values")
        )
        described = layout.Memory(
            keys=self.tables.pack(self.lookup(f"{name}.keys"), keys_bias),
            values=self.tables.pack(self.lookup(f"{name}.values"), values_bias, is_values=True),
            temperature=float(getattr(memory.selector, "temperature", 1.0)),
            power=MEMORY_POWERS[memory.kind],
        )
        if memory.finish is not None:
            described.norm = self._norm(f"{name}.finish", memory.finish)
        return described

    def _linear(self, name: str) -> int:
        return self.tables.pack(self.lookup(f"{name}.weight"), self._vector(f"{name}.bias"))

    def _untied(self, name: str) -> int:
        return self.tables.pack(self.lookup(f"{name}.weight"))

    def _norm(self, name: str, norm: nn.Module) -> layout.Norm:
        """A layer norm or RMS norm; nothing for the identity."""
        if isinstance(norm, nn.Identity):
            return layout.Norm()
        gain = self._numbers(self._vector(f"{name}.weight"))
        if isinstance(norm, nn.LayerNorm):
            return layout.Norm(gain, self._numbers(self._vector(f"{name}.bias")), norm.eps)
        assert isinstance(norm, nn.RMSNorm)
        return layout.Norm(
            gain, 0, torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
        )

    def _vector(self, name: str) -> Tensor:
        value = self.lookup(name)
        assert isinstance(value, Tensor)
        return value.detach().float()

    def _numbers(self, values: Tensor) -> int:
        """Address of float32 numbers, kept alive with this object."""
        # A view of a file would keep the whole mapping in memory.
        values = values.detach().to("cpu", torch.float32, copy=True).contiguous()
        self.owned.append(values)
        return values.data_ptr()


def _sinusoid_rates(width: int) -> Tensor:
    """Rates of `positions.sinusoids`."""
    half = (width + 1) // 2
    return torch.exp(torch.arange(half) * (-math.log(10000.0) / max(half - 1, 1)))


def _rotary_rates(head_width: int) -> Tensor:
    """Rates of `positions.rotate`."""
    return torch.as_tensor(10000.0 ** (-torch.arange(0, head_width, 2.0) / head_width))
