"""Settings of the models."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from reluformer.errors import UserError
from reluformer.model.memories.table import MEMORIES
from reluformer.ops.family.table import ATTENTIONS

Site = Literal["encoder", "decoder", "cross"]


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
    """One kind of attention and how its scale starts and learns.

    The defaults are the ReLU attention that learns as well as softmax or better
    (docs/training-relu-attention.md): (1 + s/4)^4 in place of e^s, at first, with thresholds that
    learn. `AttentionConfig.paper()` is the one that was published.
    """

    kind: str = "relu"
    power: int = 4
    """Of the rectified score. ReLU only, as all fields down to threshold_init."""
    row_normalise: float | None = 1e-4
    """Divide each row by its sum plus this number; None does not."""
    gamma: Literal["fixed", "model", "layer", "head"] = "layer"
    """Granularity at which gamma is learned; `fixed` keeps its first value."""
    gamma_init: float = 1.0
    row_sum_init: float | None = 1.0
    """Calibrate gamma on the first batches so that the mean row sum, before rows are divided by it,
    starts here; None keeps gamma_init. Undivided rows that start above 1 make the normalisation
    loss collapse the attention."""
    length_exponent: float = 1.0
    threshold: Literal["fixed", "head"] = "head"
    """`head` learns one threshold per head."""
    threshold_init: float | None = None
    """None: minus the power, from where (s + power)^power grows with s as e^s does at 0."""
    qk_norm: bool = False
    """RMS-normalise queries and keys in each head, with a learned gain."""
    output_norm: bool = False
    """RMS-normalise the output of each head, with a learned gain: a control for the attentions
    that do so by definition, and a scale-free ReLU attention."""
    dropout: float = 0.0
    """Dropout on the weights."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further fixed options of the kind, as keywords of `reluformer.attention`."""
    impl: str = "auto"

    def __post_init__(self) -> None:
        _check_name("kind", self.kind, ATTENTIONS)
        row = ATTENTIONS[self.kind]
        for name in self.options:
            if name not in row.options:
                allowed = ", ".join(sorted(row.options)) or "none"
                raise UserError(f"options.{name} is not an option of {self.kind}: {allowed}")
        if not self.gamma_init > 0:
            raise UserError(f"gamma_init must be greater than 0, got {self.gamma_init}")
        if self.row_sum_init is not None and not self.row_sum_init > 0:
            raise UserError(f"row_sum_init must be greater than 0, got {self.row_sum_init}")
        if "gamma" in row.options:
            # Refuses what no rule can be made of.
            row.weigh_with(self.fixed_options)
        _check_share("dropout", self.dropout)

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
        """What the kind takes and no layer learns, as keywords of `reluformer.attention`."""
        row = ATTENTIONS[self.kind]
        own = {name: getattr(self, name) for name in ("power", "row_normalise", "length_exponent")}
        rule = own if "gamma" in row.options else {}
        return {**rule, **self.options}

    @property
    def first_threshold(self) -> float:
        """Where thresholds start."""
        return float(-self.power) if self.threshold_init is None else self.threshold_init

    @property
    def thresholds(self) -> bool:
        """Whether there are any: they are learned, or start elsewhere than at 0."""
        return self.threshold == "head" or self.first_threshold != 0


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a ReLUFormer (encoder-decoder) or a ReLUFormerLM (decoder only)."""

    vocabulary: int
    width: int = 512
    heads: int = 8
    kv_heads: int | None = None
    """Key/value heads, shared by groups of query heads; None means one for each query head."""
    encoder_layers: int = 6
    decoder_layers: int = 6
    slots: int = 2048
    """Slots of each feed-forward memory."""
    memory: str = "relu"
    memory_options: dict[str, Any] = field(default_factory=dict)
    norm: Literal["pre", "post"] = "pre"
    positions: Literal["sinusoidal", "rotary"] = "sinusoidal"
    tie_embeddings: bool = True
    """Share one embedding between source, target and output; else three."""
    dropout: float = 0.1
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    """The attention of every site that has none of its own below."""
    encoder_attention: AttentionConfig | None = None
    decoder_attention: AttentionConfig | None = None
    cross_attention: AttentionConfig | None = None
    pad_id: int = 0
    bos_id: int = 1
    eos_id: int = 2

    def __post_init__(self) -> None:
        for name in ("vocabulary", "width", "heads", "decoder_layers", "slots"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.encoder_layers < 0:
            raise UserError(f"encoder_layers must be at least 0, got {self.encoder_layers}")
        if self.width % self.heads:
            raise UserError(f"heads must divide width {self.width}, got {self.heads}")
        if self.heads % self.key_value_heads:
            raise UserError(f"kv_heads must divide heads {self.heads}, got {self.kv_heads}")
        _check_name("memory", self.memory, MEMORIES)
        if self.positions == "rotary" and self.head_width % 2:
            raise UserError(f"rotary positions need an even head width, got {self.head_width}")
        _check_share("dropout", self.dropout)

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
        """D, the width of one head."""
        return self.width // self.heads

    @property
    def key_value_heads(self) -> int:
        """Hkv, the number of key/value heads."""
        return self.heads if self.kv_heads is None else max(self.kv_heads, 1)

    def attention_at(self, site: Site) -> AttentionConfig:
        """The attention of a site: its own, or the common one."""
        own: AttentionConfig | None = getattr(self, f"{site}_attention")
        return self.attention if own is None else own


def _check_name(field: str, name: str, table: Mapping[str, object]) -> None:
    if name not in table:
        raise UserError(f"{field} must be one of {', '.join(sorted(table))}, got {name!r}")


def _check_share(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise UserError(f"{name} must be in [0, 1), got {value}")
