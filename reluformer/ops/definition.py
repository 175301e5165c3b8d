"""What defines an attention: a function from scores to weights, and what surrounds it."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal

from torch import Tensor

from reluformer.errors import UserError
from reluformer.ops.call import (
    AttentionResult,
    Call,
    check_call,
    check_contents,
    check_options,
    check_tensors,
)
from reluformer.ops.memory import Weigh
from reluformer.ops.rule import Rectified
from reluformer.ops.stats import SumsLevel
from reluformer.ops.visibility import Visibility

LearnedShape = Literal["head", "width", "pair", "token"]


@dataclass(frozen=True)
class Attention:
    """One attention: a function from scores to weights, and what surrounds it.

    Exactly one of `weigh` (scores -> weights) and `rule` (options -> Rectified) is given; a rule
    can also be run by the fused implementations. Calling the object runs the attention.
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

    @cached_property
    def options(self) -> frozenset[str]:
        """Names of the keyword options this attention takes beyond the shared ones."""
        return frozenset(self.defaults)

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """What the options are that a call leaves out."""
        found: dict[str, Any] = {}
        for function in (self.weigh, self.rule, self.output_transform):
            found |= {} if function is None else _keywords(function)
        found.pop("second", None)
        return found

    @property
    def regularisable(self) -> bool:
        """Whether row sums are learned and matter: rectified weights, no norm that undoes sums."""
        return self.rule is not None and self.output_transform is None

    def weigh_with(self, options: Mapping[str, Any]) -> Weigh:
        """The weight function with its options bound."""
        if self.rule is not None:
            return self.rule(**_pick(self.rule, options))
        assert self.weigh is not None
        return partial(self.weigh, **_pick(self.weigh, options))

    def transform_output(self, output: Tensor, options: Mapping[str, Any]) -> Tensor:
        """The output [B, H, Tq, Dv] after this attention's norm or gate, if it has one."""
        if self.output_transform is None:
            return output
        return self.output_transform(output, **_pick(self.output_transform, options))

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, **arguments: Any
    ) -> Tensor | AttentionResult:
        """Attend as `reluformer.attention` does: a tensor, or a result if extras are asked for."""
        result = self.attend(q, k, v, **arguments)
        extras = arguments.get("return_weights") or arguments.get("return_stats")
        return result if extras or arguments.get("return_sums") else result.output

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
        key_lengths: Tensor | None = None,
        window: int | None = None,
        scale: float | None = None,
        bias: Tensor | None = None,
        dropout_p: float = 0.0,
        impl: str = "auto",
        return_weights: bool = False,
        return_stats: bool = False,
        return_sums: SumsLevel | None = None,
        entropy_every: int = 1,
        check: bool = False,
        **options: Any,
    ) -> AttentionResult:
        """Attend, with the result always in its named form."""
        # Implementations know the table's rows, so the table meets them only when a call runs.
        from reluformer.ops.backends.registry import run

        check_tensors(q, k, v)
        if scale is None:
            scale = self.default_scale(q.shape[-1])
        visibility = Visibility(mask, causal, key_lengths, window)
        extras = (return_weights, return_stats, return_sums)
        call = Call(q, k, v, visibility, scale, bias, dropout_p, *extras, entropy_every)
        self.check(call, options, contents=check)
        return run(self, call, options, impl)

    def check(self, call: Call, options: Mapping[str, Any], *, contents: bool = False) -> None:
        """Refuse a call or options that do not fit this attention; contents are read on request."""
        unknown = sorted(set(options) - self.options)
        if unknown:
            allowed = ", ".join(sorted(self.options)) or "none"
            raise UserError(
                f"{self.name} attention has no option {unknown[0]!r}; its options: {allowed}"
            )
        check_call(call)
        if self.halves and call.q.shape[-1] % 2:
            raise UserError(f"{self.name} attention needs an even width D, got {call.q.shape[-1]}")
        check_options(call, options, self.learned)
        if contents:
            check_contents(call, options)

    def default_scale(self, width: int) -> float:
        """1/sqrt(D) for dot products (of half the width where D is split), 1 for cosines."""
        if self.cosine:
            return 1.0
        return 1 / math.sqrt(max(width // 2 if self.halves else width, 1))


# Every call asks; a dictionary, because compilers warn about functools.cache.
_KEYWORDS: dict[Callable[..., Any], dict[str, Any]] = {}


def _keywords(function: Callable[..., Any]) -> dict[str, Any]:
    """Its keyword-only parameters with their defaults."""
    found = _KEYWORDS.get(function)
    if found is None:
        parameters = inspect.signature(function).parameters.values()
        found = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
        _KEYWORDS[function] = found
    return found


def _pick(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in _keywords(function) if name in options}
