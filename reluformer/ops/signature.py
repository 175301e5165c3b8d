"""Memory of checked calls, so that a repeated signature is neither checked nor chosen again."""

from collections.abc import Hashable, Iterable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reluformer.ops.backends.torch_state import PLAIN, is_untraced, prefers_onednn
from reluformer.ops.call import Call, Prepared
from reluformer.ops.rule import Rectified

CAPACITY = 1024
"""Number of signatures that are remembered; the memory is emptied when it is full."""


class Choice(NamedTuple):
    """The outcome of checking a call and choosing its backend."""

    backend: str
    rule: Rectified | None
    """The rectified rule; None if the attention has none or the rule holds tensors."""
    prepared: Prepared | None = None
    """The call as its backend has prepared it, if it can."""


# A tensor itself would be hashed by identity.
_KIND = attrgetter("__class__", "shape", "dtype", "device", "layout")
_DENSE = torch.strided
_NUMBERS = frozenset({int, float, bool, type(None)})

CHOICES: dict[Hashable, Choice] = {}
"""Choices by signature."""


def signature(name: str, call: Call, options: Mapping[str, Any], impl: str) -> Hashable | None:
    """Everything that checks and choices depend on; None for calls that are not remembered.

    Calls under a compiler, a dispatch mode or a transform of `torch.func` are not remembered, and
    neither are calls with tensors that `gate` refuses or rewrites.
    """
    q, k, v, visibility = call.q, call.k, call.v, call.visibility
    if not is_untraced(q) or type(k) not in PLAIN or type(v) not in PLAIN:
        return None
    device = q.device
    if (
        k.device != device or v.device != device
        or q.layout is not _DENSE or k.layout is not _DENSE or v.layout is not _DENSE
        or q.is_neg() or k.is_neg() or v.is_neg()
        or q._is_zerotensor() or k._is_zerotensor() or v._is_zerotensor()
    ):  # fmt: skip
        return None
    tensors: Hashable = None
    if visibility.mask is not None or call.bias is not None or visibility.key_lengths is not None:
        optional = (visibility.mask, call.bias, visibility.key_lengths)
        tensors = tuple([_kind(t) if isinstance(t, Tensor) else t for t in optional])
    # Types too: 2 == 2.0 and 1 == True, but not all of them are allowed.
    values: Iterable[Hashable] = options.values()
    types = tuple(map(type, values))
    if not _NUMBERS.issuperset(types):
        values = [_kind(x) if isinstance(x, Tensor) else x for x in values]
    # On a CPU, `auto` also looks at the library of float32 products.
    has_onednn = name == "softmax" and device.type == "cpu" and prefers_onednn()
    causal, window, every = visibility.causal, visibility.window, call.entropy_every
    return (
        name, impl, has_onednn, q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(),
        q.dtype, k.dtype, v.dtype, device, tensors,
        causal, type(causal), window, type(window), call.scale, call[6:11], type(every),
        types, *options, *values,
    )  # fmt: skip


def _kind(tensor: Tensor) -> Hashable:
    """Everything about a tensor but its values; never repeated for a lazy tensor."""
    if tensor.is_neg() or tensor._is_zerotensor():
        return object()
    return _KIND(tensor), tensor.stride()


def remember(key: Hashable, choice: Choice) -> None:
    """Store the choice of a checked call."""
    if len(CHOICES) >= CAPACITY:
        CHOICES.clear()
    CHOICES[key] = choice
