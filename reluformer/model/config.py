"""Configuration of the models."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from reluformer.config.checks import check_above_zero, check_at_least, check_fraction
from reluformer.config.schema import check_fields, convert_finite
from reluformer.errors import UserError
from reluformer.model.memories.definition import MemorySize
from reluformer.model.memories.table import MEMORIES
from reluformer.ops.family.table import ATTENTIONS

Site = Literal["encoder", "decoder", "cross"]
SITES: tuple[Site, ...] = ("encoder", "decoder", "cross")


_PAPER_ATTENTION: dict[str, Any] = {
    "power": 1,
    "row_normalise": None,
    "length_exponent": 0.5,
    "row_sum_init": None,
    "threshold": "fixed",
    "threshold_init": 0.0,
}
_PAPER_MODEL: dict[str, Any] = {
    "width": 512,
    "heads": 4,
    "encoder_layers": 6,
    "decoder_layers": 6,
    "slots": 1024,
    "norm": "post",
    "dropout": 0.3,
}


@dataclass(frozen=True)
class AttentionConfig:
    """Configuration of an attention.

    The defaults are row-normalised ReLU^4 with learned thresholds, which starts with (1 + s/4)^4 in
    place of e^s and trains as well as softmax on sentences; documents need `power=8`
    (docs/training-relu-attention.md). `AttentionConfig.paper()` is the published attention.
    """

    kind: str = "relu"
    """Name of the attention in `reluformer.ATTENTIONS`."""
    power: int = 4
    """Power of the rectified score: 1, 2, 4 or 8. For `relu` only, like all fields up to
    `threshold_init`."""
    row_normalise: float | None = 1e-4
    """Divide each row by its sum plus this number; None leaves rows unnormalised."""
    gamma: Literal["fixed", "model", "layer", "head"] = "layer"
    """Part of the model that shares one learned gamma; `fixed` keeps the initial value."""
    gamma_init: float = 1.0
    """First value of gamma, unless it is calibrated."""
    row_sum_init: float | None = 1.0
    """Calibrate gamma on sample batches so that unnormalised row sums start with this mean; None
    keeps gamma_init. If unnormalised rows start above 1, the normalisation loss makes the attention
    collapse."""
    length_exponent: float = 1.0
    """Weights are divided by gamma (n/2)^length_exponent, n the number of visible keys."""
    threshold: Literal["fixed", "head"] = "head"
    """`head` learns a threshold for each head; `fixed` keeps the initial value."""
    threshold_init: float | None = None
    """Initial threshold; None is minus the power, so that (s + power)^power grows as e^s near 0."""
    qk_norm: bool = False
    """RMS norm of queries and keys in each head, with a learned gain."""
    output_norm: bool = False
    """RMS norm of the output of each head, with a learned gain: a control for the attentions
    that have one by definition."""
    dropout: float = 0.0
    """Dropout rate of the weights."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further fixed options of the kind, keyword arguments of `reluformer.attention`."""
    impl: str = "auto"
    """Backend; `auto` is the fastest that supports the call."""

    def __post_init__(self) -> None:
        check_fields(self)
        _check_name("kind", self.kind, ATTENTIONS)
        row = ATTENTIONS[self.kind]
        for name, value in self.options.items():
            if name not in row.options:
                allowed = ", ".join(sorted(row.options)) or "none"
                raise UserError(f"options.{name} is not an option of {self.kind}: {allowed}")
            hint = int if type(row.defaults[name]) is int else float | None
            convert_finite(hint, value, f"options.{name}")
        check_above_zero(self, "gamma_init", "row_sum_init")
        if "gamma" in row.options:
            # Raises UserError for values that the rule does not allow.
            row.weigh_with(self.fixed_options)
        check_fraction(self, "dropout")

    @classmethod
    def paper(cls, **changes: Any) -> Self:
        """The published attention: ReLU(s) / (gamma sqrt(n/2)), gamma learned from 1.

        `ModelConfig.paper` is the whole model; the shipped recipe `paper` adds the two losses and
        the training settings.

        Args:
            **changes: Fields that replace published values.
        """
        return cls(**{**_PAPER_ATTENTION, **changes})

    @property
    def fixed_options(self) -> dict[str, Any]:
        """Options that are not learned, as keyword arguments of `reluformer.attention`."""
        row = ATTENTIONS[self.kind]
        fields = ("power", "row_normalise", "length_exponent") if "gamma" in row.options else ()
        return {**{name: getattr(self, name) for name in fields}, **self.options}

    @property
    def first_threshold(self) -> float:
        """Initial value of the thresholds."""
        return float(-self.power) if self.threshold_init is None else self.threshold_init

    @property
    def thresholds(self) -> bool:
        """Whether thresholds are learned or differ from 0."""
        return self.threshold == "head" or self.first_threshold != 0


@dataclass(frozen=True)
class ModelConfig:
    """Configuration of a ReLUFormer (encoder-decoder) or a ReLUFormerLM (decoder only).

    Examples:
        >>> ModelConfig(vocabulary=10_000, width=256, attention=AttentionConfig(kind="softmax"))

    `ModelConfig.paper` is the published model. A value that is not allowed raises a `UserError`.
    """

    vocabulary: int
    """Number of token ids."""
    width: int = 512
    """Width of the residual stream; each head has width / heads."""
    heads: int = 8
    """Query heads of each attention."""
    kv_heads: int | None = None
    """Number of key/value heads, shared by groups of query heads; None is one per query head."""
    encoder_layers: int = 6
    """Layers of the encoder; a language model has none."""
    decoder_layers: int = 6
    """Layers of the decoder."""
    slots: int = 2048
    """Number of slots of each feed-forward memory, the hidden size of the layer."""
    memory: str = "relu"
    """Kind of the feed-forward memories, a name in `reluformer.model.memory.MEMORIES`."""
    memory_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of `KeyValueMemory`, such as k, experts or value_std."""
    norm: Literal["pre", "post"] = "pre"
    """Layer norm in front of each branch, or after its residual sum."""
    positions: Literal["sinusoidal", "rotary"] = "sinusoidal"
    """Sinusoids added to the embeddings, or rotations of queries and keys."""
    tie_embeddings: bool = True
    """Whether source, target and output share one embedding."""
    dropout: float = 0.1
    """Dropout rate of embeddings and residual branches."""
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    """Attention of all sites that the next three fields do not set."""
    encoder_attention: AttentionConfig | None = None
    decoder_attention: AttentionConfig | None = None
    cross_attention: AttentionConfig | None = None
    pad_id: int = 0
    bos_id: int = 1
    eos_id: int = 2

    def __post_init__(self) -> None:
        check_fields(self)
        check_at_least(1, self, "vocabulary", "width", "heads", "kv_heads")
        check_at_least(1, self, "decoder_layers", "slots")
        check_at_least(0, self, "encoder_layers", "pad_id", "bos_id", "eos_id")
        for name in ("pad_id", "bos_id", "eos_id"):
            if getattr(self, name) >= self.vocabulary:
                raise UserError(
                    f"{name} must be below vocabulary {self.vocabulary}, got {getattr(self, name)}"
                )
        if self.width % self.heads:
            raise UserError(f"heads must divide width {self.width}, got {self.heads}")
        if self.heads % self.key_value_heads:
            raise UserError(f"kv_heads must divide heads {self.heads}, got {self.kv_heads}")
        if self.positions == "rotary" and self.head_width % 2:
            raise UserError(f"rotary positions need an even head width, got {self.head_width}")
        check_fraction(self, "dropout")
        self._check_memory()

    def _check_memory(self) -> None:
        """Check `memory` and its options as `KeyValueMemory` does."""
        _check_name("memory", self.memory, MEMORIES)
        common = {"bias": bool, "dropout": float, "heads": int, "value_std": float | None}
        for name, hint in common.items():
            if name in self.memory_options:
                convert_finite(hint, self.memory_options[name], f"memory_options.{name}")
        options = {k: value for k, value in self.memory_options.items() if k not in common}
        heads = self.memory_options.get("heads", 1)
        try:
            selector = MEMORIES[self.memory].select_with(options)
            selector.check(MemorySize(self.width, self.slots, heads))
        except UserError as error:
            raise UserError(f"memory_options: {error}") from None

    @classmethod
    def paper(cls, vocabulary: int, **changes: Any) -> Self:
        """The published IWSLT14 model: post-norm, 6+6 layers, `AttentionConfig.paper` at all sites.

        Args:
            vocabulary: Number of token ids.
            **changes: Fields that replace published values.
        """
        published = {**_PAPER_MODEL, "attention": AttentionConfig.paper()}
        return cls(vocabulary, **{**published, **changes})

    @property
    def head_width(self) -> int:
        """Width D of one head."""
        return self.width // self.heads

    @property
    def key_value_heads(self) -> int:
        """Number Hkv of key/value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    def attention_at(self, site: Site) -> AttentionConfig:
        """The attention of a site: its own, or the common one."""
        config: AttentionConfig | None = getattr(self, f"{site}_attention")
        return self.attention if config is None else config

    @property
    def regularisable_sites(self) -> frozenset[Site]:
        """Sites whose attention has row sums that losses act on."""
        kinds = {site: self.attention_at(site).kind for site in SITES}
        return frozenset(site for site, kind in kinds.items() if ATTENTIONS[kind].regularisable)


def _check_name(field: str, name: str, table: Mapping[str, object]) -> None:
    if name not in table:
        raise UserError(f"{field} must be one of {', '.join(sorted(table))}, got {name!r}")
