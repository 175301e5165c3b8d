"""The mask function of transformers for our attentions: masks stay lengths, windows and packing.

transformers calls a mask function once in each forward pass and hands its result to all layers. A
bool mask [B, 1, Tq, Tk] would keep the fast kernels from running, so `attention_mask` returns a
`CompactMask` where the mask follows from rules. For every operation it is an ordinary bool mask.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map_only
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)
from transformers.utils.import_utils import is_tracing

from reluformer.ops.visibility import Visibility

MaskFunction = Callable[..., Any]
"""transformers' predicate (batch, head, query, key) -> visible."""


NEEDS_MASKS: set[type] = set()
"""Configuration classes of models whose attention modules do not say whether they are causal."""


class CompactMask(Tensor):
    """Bool mask [B, 1, Tq, Tk], True = visible, that is stored as the rules it follows from.

    The tensor has no storage. An operation on it first builds the mask, so a model may slice or
    combine it; the result is then a plain tensor. `compact` gives the rules to our attentions.
    """

    visibility: Visibility
    keys: int
    segments: Tensor | None
    _ends: Tensor | None

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, int, int, int],
        device: torch.device,
        visibility: Visibility,
        keys: int,
        segments: Tensor | None = None,
    ) -> Self:
        """Create a mask.

        Args:
            shape: [B, 1, Tq, Tk].
            device: Device of the mask.
            visibility: Rules on the first `keys` keys.
            keys: Number of keys before the unused part of a static cache.
            segments: Number of the packed sequence of each token, [B, Tq]; None without packing.
        """
        mask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.visibility, mask.keys, mask.segments = visibility, keys, segments
        mask._ends = None
        return mask

    @property
    def is_packed(self) -> bool:
        """Whether causality, a window and packed sequences alone hide keys."""
        rules = self.visibility
        return self.segments is not None and rules.mask is None and rules.key_lengths is None

    def queries(self, is_cross: bool) -> Tensor | None:
        """Bool [B, Tq], False for queries that are padding; None if all are tokens or unknown.

        Args:
            is_cross: Whether the keys belong to another sequence than the queries.
        """
        rules, rows = self.visibility, self.shape[2]
        if is_cross or rows == 1 or not (rules.causal or rows == self.keys):
            return None
        if rules.key_lengths is not None:
            position = torch.arange(self.keys - rows, self.keys, device=self.device)
            return position < rules.key_lengths.unsqueeze(-1)
        return None if rules.mask is None else rules.mask[:, 0, 0, -rows:]

    def boundaries(self) -> tuple[Tensor, int]:
        """Boundaries [N + 1] of the N packed sequences in the flattened batch, and their maximum.

        The maximum is a bound, the number of tokens of a batch row. The first call synchronises
        with a GPU; the layers of a forward pass share the result.
        """
        if self._ends is None:
            assert self.segments is not None
            starts = torch.ones_like(self.segments, dtype=torch.bool)
            starts[:, 1:] = self.segments[:, 1:] != self.segments[:, :-1]
            ends = starts.flatten().nonzero().squeeze(-1)
            self._ends = functional.pad(ends, (0, 1), value=starts.numel()).to(torch.int32)
        return self._ends, self.shape[2]

    def dense(self) -> Tensor:
        """The mask as a plain bool tensor [B, 1, Tq, Tk]."""
        batch, _, rows, keys = self.shape
        table = self.visibility.table(rows, self.keys, self.device)
        if table is None:
            table = torch.ones((rows, self.keys), dtype=torch.bool, device=self.device)
        if self.segments is not None:
            table = table & same_segment(self.segments)
        table = table.expand(batch, 1, rows, self.keys)
        return functional.pad(table, (0, keys - self.keys))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch documents it
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(CompactMask, CompactMask.dense, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"CompactMask({list(self.shape)}, {self.visibility}, keys={self.keys})"


def same_segment(segments: Tensor) -> Tensor:
    """Bool [B, 1, T, T]: whether two tokens belong to one packed sequence; segments is [B, T]."""
    return (segments.unsqueeze(-1) == segments.unsqueeze(-2)).unsqueeze(1)


@dataclass(frozen=True)
class _Rules:
    """Rules that a mask function of transformers consists of."""

    causal: bool
    window: int | None = None
    segments: Tensor | None = None


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Tensor | None:
    """Mask function for `transformers.AttentionMaskInterface`.

    A padding mask is read once, which synchronises with a GPU, as transformers' own function for
    SDPA does.

    Args:
        batch_size: B.
        q_length: Tq.
        kv_length: Tk, including the unused part of a static cache.
        q_offset: Position of the first query.
        kv_offset: Position of the first key.
        mask_function: transformers' predicate (batch, head, query, key) -> visible.
        attention_mask: Padding mask [B, positions], True for tokens; None without padding.
        device: Device of the mask.
        **options: Further arguments of `sdpa_mask`, and `config`, the configuration of the model.

    Returns:
        None where all keys are visible or causality alone hides keys, and the attention modules
        know which (`NEEDS_MASKS`); a `CompactMask`; or, for predicates that are not causality, a
        window or packing, a bool mask [B, 1, Tq, Tk].
    """
    rules = _rules(mask_function)
    may_skip = options.pop("allow_is_causal_skip", True)
    may_skip_all = options.pop("allow_is_bidirectional_skip", False)
    may_skip = may_skip if rules is not None and rules.causal else may_skip_all
    may_skip = may_skip and type(options.get("config")) not in NEEDS_MASKS
    size = (batch_size, q_length, kv_length)
    traced = torch.compiler.is_compiling() or is_tracing(attention_mask)
    if rules is None or isinstance(q_offset, Tensor) or traced:
        is_causal_only = rules == _Rules(causal=True) and q_length == kv_length
        if attention_mask is None and may_skip and (is_causal_only or rules == _Rules(False)):
            return None
        mask: Tensor | None = sdpa_mask(
            *size,
            q_offset,
            kv_offset,
            mask_function,
            attention_mask,
            allow_is_causal_skip=False,
            device=device,
            **options,
        )
        return mask
    keys = min(q_offset + q_length - kv_offset, kv_length) if rules.causal else kv_length
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + keys]
    lengths, hidden = _padding_rules(padding)
    window = rules.window if rules.window is not None and keys > rules.window else None
    causal = rules.causal and q_length > 1
    visibility = Visibility(hidden, causal, lengths, window)
    is_plain = lengths is None and hidden is None and window is None and rules.segments is None
    # Without a mask, a single row sees all keys, and several rows are causal from the first key.
    if may_skip and is_plain and keys == kv_length and (not causal or keys == q_length):
        return None
    shape = (batch_size, 1, q_length, kv_length)
    compact = CompactMask(shape, torch.device(device), visibility, keys, rules.segments)
    if compact.is_packed:
        # Computed here, because in a compiled layer it would break the graph.
        compact.boundaries()
    return compact


def _padding_rules(padding: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Lengths [B] if padding [B, Tk] is on the right, or a mask [B, 1, 1, Tk] if it is not."""
    if padding is None:
        return None, None
    lengths = padding.sum(dim=-1)
    on_right = torch.arange(padding.shape[1], device=padding.device) < lengths.unsqueeze(-1)
    answers = torch.stack([padding.all(), (padding == on_right).all()])
    is_full, is_right = answers.tolist()
    if is_full:
        return None, None
    return (lengths, None) if is_right else (None, padding[:, None, None, :])


def _rules(function: MaskFunction) -> _Rules | None:
    """The rules of a mask function, or None if it has others than causality, window, packing."""
    if function is causal_mask_function:
        return _Rules(causal=True)
    if function is bidirectional_mask_function:
        return _Rules(causal=False)
    # A compiler cannot trace the inspection of closures.
    if torch.compiler.is_compiling():
        return None
    causal, window, segments = False, None, None
    for part in _conjuncts(function):
        name, variables = getattr(part, "__qualname__", ""), _variables(part)
        if part is causal_mask_function:
            causal = True
        elif name.startswith("sliding_window_overlay.") and "sliding_window" in variables:
            window = variables["sliding_window"]
        elif name.startswith("packed_sequence_mask_function.") and len(variables) == 1:
            (segments,) = variables.values()
        else:
            return None
    # Without causality, transformers' windows and packing have other definitions.
    return _Rules(causal, window, segments) if causal else None


def _conjuncts(function: MaskFunction) -> list[MaskFunction]:
    """The functions that transformers' `and_masks` has combined, or the function itself."""
    if not getattr(function, "__qualname__", "").startswith("and_masks."):
        return [function]
    parts = _variables(function).get("mask_functions", ())
    return [inner for part in parts for inner in _conjuncts(part)] or [function]


def _variables(function: MaskFunction) -> dict[str, Any]:
    """Variables that a function has from an enclosing function."""
    is_function = inspect.isfunction(function)
    return dict(inspect.getclosurevars(function).nonlocals) if is_function else {}
