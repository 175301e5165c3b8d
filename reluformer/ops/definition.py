"""Definition of an attention: the weight function, its options and the output transform."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from torch import Tensor

from reluformer.ops.memory import Weigh
from reluformer.ops.rule import Rectified

LearnedShape = Literal["head", "width", "pair", "token"]


@dataclass(frozen=True)
class Attention:
    """One attention: a function from scores to weights, its options and its output transform.

    Exactly one of `weigh` (scores -> weights) and `rule` (options -> Rectified) is given; a rule
    also runs on the fused backends. `reluformer.ops.api.attend` runs an attention.
    """

    name: str
    formula: str
    paper: str
    weigh: Callable[..., Tensor] | None = None
    rule: Callable[..., Rectified] | None = None
    output_transform: Callable[..., Tensor] | None = None
    cosine: bool = False
    """Scores are cosines of q and k, with a default scale of 1."""
    halves: bool = False
    """q and k are split in two halves of D, which give two score maps."""
    ordered: bool = False
    """The order of the keys matters."""
    learned: Mapping[str, LearnedShape] = field(default_factory=dict)
    """Options that a model learns: one value per head, per output feature, two, or per token."""

    # Plain attributes: torch.compile cannot trace the first access to a cached property.
    defaults: dict[str, Any] = field(init=False, repr=False, compare=False)
    """Default values of the options."""
    options: frozenset[str] = field(init=False, repr=False, compare=False)
    """Names of the keyword options this attention takes beyond the shared ones."""

    def __post_init__(self) -> None:
        defaults: dict[str, Any] = {}
        for function in (self.weigh, self.rule, self.output_transform):
            defaults |= {} if function is None else _keywords(function)
        defaults.pop("second", None)
        object.__setattr__(self, "defaults", defaults)
        object.__setattr__(self, "options", frozenset(defaults))

    @property
    def regularisable(self) -> bool:
        """Whether a loss on row sums has an effect: rectified weights without an output norm."""
        return self.rule is not None and self.output_transform is None

    def rectified(self, options: Mapping[str, Any]) -> Rectified | None:
        """The rectified rule with its options; None for attentions without one."""
        return None if self.rule is None else self.rule(**_pick(self.rule, options))

    def weigh_with(self, options: Mapping[str, Any]) -> Weigh:
        """The weight function with its options bound."""
        rule = self.rectified(options)
        if rule is not None:
            return rule
        assert self.weigh is not None
        return partial(self.weigh, **_pick(self.weigh, options))

    def transform_output(self, output: Tensor, options: Mapping[str, Any]) -> Tensor:
        """The output [B, H, Tq, Dv] after this attention's norm or gate, if it has one."""
        if self.output_transform is None:
            return output
        return self.output_transform(output, **_pick(self.output_transform, options))

    def default_scale(self, width: int) -> float:
        """1/sqrt(D) for dot products (of half the width where D is split), 1 for cosines."""
        if self.cosine:
            return 1.0
        return 1 / math.sqrt(max(width // 2 if self.halves else width, 1))


# A dictionary, because torch.compile warns about functools.cache.
_KEYWORDS: dict[Callable[..., Any], dict[str, Any]] = {}


def _keywords(function: Callable[..., Any]) -> dict[str, Any]:
    """The function's keyword-only parameters with their defaults."""
    keywords = _KEYWORDS.get(function)
    if keywords is None:
        parameters = inspect.signature(function).parameters.values()
        keywords = {
            p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY
        }
        _KEYWORDS[function] = keywords
    return keywords


def _pick(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in _keywords(function) if name in options}
