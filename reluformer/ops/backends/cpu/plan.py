"""One call of the CPU backend: its numbers, its visibility and the factors of its rows.

With x = max(q.k + score_offset, 0), a weight is C_i x^power. The row factor
C_i = scale^power / (gamma (n_i / 2)^length_exponent) multiplies each output row once.
"""

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from reluformer.ops.backends.cpu.native import library
from reluformer.ops.backends.torch_state import is_untraced, needs_grad
from reluformer.ops.call import Call
from reluformer.ops.rule import Rectified
from reluformer.ops.visibility import Visibility

# With fewer query rows the call is decoding. Training keeps x of up to SHORT scores a head.
MANY_ROWS, SHORT = 16, 1 << 18

# Row-normalised bfloat16 training with fewer keys is computed in float32.
_SHORT_ROW = 128

_CAPACITY = 64


class Plan(NamedTuple):
    """The call without the tensors that may need gradients."""

    scale: float
    """Factor on q.k that is left after q is multiplied by `unit`."""
    unit: float
    """Power of two that multiplies q, so that high powers of q.k cannot overflow; 1: none."""
    gamma: float
    """1 if gamma is a tensor."""
    threshold: float
    """0 if the threshold is a tensor."""
    length_exponent: float
    power: int
    visibility: Visibility
    dropout_p: float
    statistics: int
    """Row sums that are computed: 0 none, 1 sum(w), 2 also sum(w ln w)."""
    row_normalise: float
    """Number added to a row's sum before the row is divided by it; 0: no division."""
    rows: int
    keys: int
    """Tk, padding included."""
    is_whole: bool
    """Whether the scores of a head form one tile."""
    is_decoding: bool
    """Whether copies of k and v would take longer than the products."""
    adds_offset: bool
    """Whether the score offset is added to finished scores, not in their product."""
    needs_grad: bool
    is_native: bool
    """Whether the native kernels run the call."""
    keeps_exact: bool
    """Whether the native kernels compute a bfloat16 call in float32 and keep the exact output.

    They round weights and outputs otherwise, which spoils row-normalised gradients of short rows.
    """
    may_mix_hidden: bool
    """Whether products contain keys and values that a row cannot see, with weight 0."""

    def band(self, rows: slice, keys: slice) -> tuple[int, int]:
        """Least and greatest visible (key - row), both counted from the tile's corner."""
        low, high = -(1 << 60), 1 << 60
        diagonal = rows.start + self.keys - self.rows - keys.start
        window = self.visibility.window
        if self.visibility.causal:
            high = diagonal
        if window is not None:
            low, high = diagonal - window + 1, min(high, diagonal + window - 1)
        return low, high


def make_plan(call: Call, rule: Rectified) -> Plan:
    """The plan of a call."""
    q, k = call.q, call.k
    gamma, threshold, scale, unit = rule.gamma, rule.threshold, call.scale, 1.0
    if rule.power > 2:
        # A power of two changes no digit of q.
        unit = 2.0 ** round(math.log2(scale))
        scale /= unit
    rows, keys = q.shape[2], k.shape[2]
    trains = needs_grad(q, k, call.v, gamma, threshold)
    is_whole = rows < MANY_ROWS or (trains and rows * keys <= SHORT)
    is_decoding = rows < MANY_ROWS and not trains
    has_table = call.visibility.mask is not None or call.dropout_p > 0
    statistics = call.statistics
    is_native = call.dropout_p == 0 and statistics < 2 and _has_kernel(call, trains)
    is_rounded = is_native and trains and q.dtype == torch.bfloat16
    keeps_exact = is_rounded and rule.row_normalise is not None and keys < _SHORT_ROW
    rules = call.visibility
    if trains:
        # The backward pass must not see a change of the caller's lengths or mask.
        lengths, mask = rules.key_lengths, rules.mask
        rules = replace(
            rules,
            key_lengths=None if lengths is None else lengths.clone(),
            mask=None if mask is None else _without_repeats(mask).clone(),
        )
    may_mix_hidden = rules.mask is not None or rules.window is not None
    may_mix_hidden |= (rules.causal and rows > 1) or (
        rules.key_lengths is not None and not is_native
    )
    return Plan(
        scale,
        unit,
        1.0 if isinstance(gamma, Tensor) else float(gamma),
        0.0 if isinstance(threshold, Tensor) else float(threshold),
        rule.length_exponent,
        rule.power,
        rules,
        call.dropout_p,
        statistics if rule.row_normalise is None else max(statistics, 1),
        rule.row_normalise or 0.0,
        rows,
        keys,
        is_whole or has_table,
        is_decoding,
        is_decoding and q.dtype != torch.bfloat16,
        trains,
        is_native,
        keeps_exact,
        may_mix_hidden,
    )


def _has_kernel(call: Call, trains: bool) -> bool:
    """Whether the native kernels are built and take the tensors of the call."""
    kernels = library.load()
    if kernels is None or not is_untraced(call.q):
        return False
    if not (call.q.numel() and call.k.numel() and call.v.numel()):
        return False
    if call.q.dtype != torch.bfloat16:
        return call.q.dtype == torch.float32
    if kernels.bf16_products is not None:
        return True
    return not trains and call.q.shape[2] * call.groups < kernels.few_rows


def _without_repeats(mask: Tensor) -> Tensor:
    """The mask with size 1 along axes on which it is expanded."""
    for axis, stride in enumerate(mask.stride()):
        if stride == 0:
            mask = mask.narrow(axis, 0, min(1, mask.shape[axis]))
    return mask


def sum_dtype(q: Tensor) -> torch.dtype:
    """Dtype of sums over rows: float32, or float64 for float64 inputs."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def score_offset(plan: Plan, q: Tensor, threshold: Tensor | None) -> Tensor | None:
    """-threshold / scale of each head, [H]; None without a threshold."""
    if threshold is not None:
        return threshold.detach().to(sum_dtype(q)) / -plan.scale
    if not plan.threshold:
        return None
    return q.new_full((q.shape[1],), -plan.threshold / plan.scale, dtype=sum_dtype(q))


_FACTORS: dict[tuple[object, ...], Tensor | float] = {}


def row_factor(
    plan: Plan, q: Tensor, gamma: Tensor | None, visible: Tensor | None = None
) -> Tensor | float:
    """C_i, broadcastable to [B, H, Tq]; visible is the table of visible keys, if there is one.

    Native calls, which nothing traces, remember factors that depend on the lengths alone.
    """
    visibility, key = plan.visibility, None
    factor: Tensor | float | None = None
    if plan.is_native and visibility.key_lengths is None and visibility.mask is None:
        key = (plan.rows, plan.keys, visibility.causal, visibility.window, plan.scale, plan.power,
               plan.gamma, plan.length_exponent, q.dtype)  # fmt: skip
        factor = _FACTORS.get(key)
    if factor is None:
        unit = plan.scale**plan.power / plan.gamma
        # A tensor that is created in inference mode could not take part in training later.
        with nullcontext() if key is None else torch.inference_mode(False):
            n: Tensor | int
            if visible is None:
                n = visibility.count(plan.rows, plan.keys, q.device)
            else:
                n = visible.sum(-1, dtype=torch.int32)
            if isinstance(n, int):
                factor = unit * (max(n, 1) / 2) ** -plan.length_exponent
            else:
                # A row that sees no key has no x to scale; n = 1 keeps the factor finite.
                factor = unit * (n.clamp(min=1).to(sum_dtype(q)) / 2) ** -plan.length_exponent
        if key is not None:
            if len(_FACTORS) >= _CAPACITY:
                _FACTORS.clear()
            _FACTORS[key] = factor
    if gamma is not None:
        factor = factor / gamma.detach().to(sum_dtype(q))[:, None]
    return factor


def normalised_factor(plan: Plan, factor: Tensor | float, sums: Tensor | None) -> Tensor | float:
    """Factor of each output row: C_i, divided by the row's sum if the rule normalises rows."""
    if not plan.row_normalise:
        return factor
    assert sums is not None
    return factor / (sums + plan.row_normalise)
