"""Memory of checked calls, so that a repeated signature is neither checked nor chosen again."""

from collections.abc import Hashable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor

from reluformer.ops.backends.torch_state import autocast_dtype, is_untraced
from reluformer.ops.call import Call
from reluformer.ops.rule import Rectified

CAPACITY = 1024
"""Number of signatures that are remembered; the memory is emptied when it is full."""


class Choice(NamedTuple):
    """The outcome of checking a call and choosing its backend."""

    backend: str
    rule: Rectified | None
    """The rectified rule; None if the attention has none or the rule holds tensors."""


# (shape, dtype); a tensor itself would be hashed by identity.
_KIND = attrgetter("shape", "dtype")

CHOICES: dict[Hashable, Choice] = {}
"""Choices by signature."""


def signature(name: str, call: Call, options: Mapping[str, Any], impl: str) -> Hashable | None:
    """Everything that checks and choices depend on; None for calls that are not remembered.

    Calls under a compiler, a dispatch mode or a functorch transform are not remembered.
    """
    q, k, v, visibility = call.q, call.k, call.v, call.visibility
    if not is_untraced(q) or type(k) is not Tensor or type(v) is not Tensor:
        return None
    tensors: Hashable = None
    if visibility.mask is not None or call.bias is not None or visibility.key_lengths is not None:
        optional = (visibility.mask, call.bias, visibility.key_lengths)
        tensors = tuple([_KIND(t) if isinstance(t, Tensor) else t for t in optional])
    return (
        name, impl, q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device,
        autocast_dtype(q), tensors, visibility.causal, visibility.window, call.scale, call[6:11],
        *options, *[_KIND(x) if isinstance(x, Tensor) else x for x in options.values()],
    )  # fmt: skip


def remember(key: Hashable, choice: Choice) -> None:
    """Store the choice of a checked call."""
    if len(CHOICES) >= CAPACITY:
        CHOICES.clear()
    CHOICES[key] = choice
