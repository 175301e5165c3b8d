"""Rectified attention in plain torch operations on the CPU.

Decoding (few query rows) is two products over whole tables of scores. So are short sequences in
training, whose x the backward pass reads again, and calls with a mask or dropout, which are
quadratic in the length anyway. All other calls run in tiles that stay in the cache, with memory
linear in the lengths: there padding is rows of zeros, which have no weight, and the causal edge is
a triangle.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from reluformer.ops.backends.cpu import tiles
from reluformer.ops.backends.cpu.plan import (
    MANY_ROWS,
    Plan,
    normalised_factor,
    row_factor,
    score_offset,
    sum_dtype,
)
from reluformer.ops.backends.torch_state import is_untraced
from reluformer.ops.rule import raised

Results = tuple[
    Tensor,
    Tensor | None,
    Tensor | None,
    Tensor | float,
    Tensor | None,
    Tensor | None,
    Tensor | None,
    bool,
]
"""Output [B, H, Tq, Dv], row sums and sums of w ln w [B, H, Tq], row factors. For the backward
pass, in plain torch x and the scaled dropout mask, both [B * Hkv, G * Tq, Tk], and from native
kernels the output before it was rounded (`Plan.keeps_exact`). The last is whether hidden keys or
values may have made the output non-finite."""

Forward = Callable[[Plan, Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Results]

Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, bool]
"""Gradients of q, k and v, and of the score offset, [B, H], if there is one; the sum of each output
row times its gradient, [B, H, Tq], if it was computed. The last is whether hidden keys or values
may have made them non-finite."""


class Incoming(NamedTuple):
    """The results of a forward pass and their gradients; None if they are not needed."""

    grad: Tensor
    """Gradient of the output, [B, H, Tq, Dv]."""
    grad_sum: Tensor | None
    """Gradient of the row sums, [B, H, Tq]."""
    grad_log: Tensor | None
    """Gradient of the sums of w ln w, [B, H, Tq]."""
    factor: Tensor | float
    """C_i, broadcastable to [B, H, Tq]."""
    output: Tensor | None
    """As exact as it was kept, [B, H, Tq, Dv]."""
    sums: Tensor | None
    """Row sums, [B, H, Tq]."""


def forward(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, gamma: Tensor | None, threshold: Tensor | None
) -> Results:
    """Forward pass; q [B, H, Tq, D], k and v [B, Hkv, Tk, .], gamma and threshold [H] or None."""
    offset = score_offset(plan, q, threshold)
    by_group, keys, values = _tables(plan, q, k, v, offset)
    sums = logs = x = kept = visible = None
    if plan.statistics:
        sums = by_group.new_zeros(by_group.shape[:3], dtype=sum_dtype(q))
        logs = torch.zeros_like(sums) if plan.statistics > 1 else None
    if plan.is_whole:
        if plan.visibility.mask is not None or plan.visibility.key_lengths is not None:
            visible = plan.visibility.table(plan.rows, plan.keys, q.device)
        rows = by_group.flatten(1, 2)  # [B * Hkv, G * Tq, D]
        if q.dtype == torch.bfloat16 and plan.rows < MANY_ROWS:
            # A few rows times a transposed table of bfloat16 can take four times as long as this.
            x = tiles.multiply(keys, rows.transpose(1, 2)).transpose(1, 2).contiguous()
        else:
            x = tiles.multiply(rows, keys.transpose(-1, -2))
        by_head = x.view(*q.shape[:3], plan.keys)
        if offset is not None and plan.adds_offset:
            by_head.add_(offset.to(x.dtype).view(-1, 1, 1))
        tiles.rectify_visible(plan, by_head, visible)
        weight = raised(x, plan.power)
        tiles.add_sums(weight, x, sums, logs)
        if plan.dropout_p:
            kept = torch.empty_like(x).bernoulli_(1 - plan.dropout_p).div_(1 - plan.dropout_p)
            weight = weight * kept
        out = tiles.multiply(weight, values)
    else:
        out = tiles.tiled(plan, by_group, keys, values, sums, logs)
    factor = row_factor(plan, q, gamma, visible)
    if sums is not None:
        sums = sums.view(q.shape[:3])
        if logs is not None:
            logs = factor * (_log(factor) * sums + plan.power * logs.view(q.shape[:3]))
        sums = factor * sums
    out = out.view(*q.shape[:3], v.shape[-1]).mul_(_column(normalised_factor(plan, factor, sums)))
    return out, sums, logs, factor, x, kept, None, _is_spoilt(plan, out)


def backward(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    threshold: Tensor | None,
    rows: Incoming,
    x: Tensor | None,
    kept: Tensor | None,
) -> Gradients:
    """Backward pass; x and kept are those of `forward`."""
    width, groups = q.shape[-1], q.shape[1] // k.shape[1]
    offset = score_offset(plan, q, threshold)
    inputs = _tables(plan, q, k, v, offset)
    exact = sum_dtype(q)
    ratio = normalised_factor(plan, rows.factor, rows.sums)
    row_dot: Tensor | None = None
    if rows.output is not None:
        row_dot = (rows.output.to(exact) * rows.grad.to(exact)).sum(-1)
    scaled = _grouped((rows.grad * _column(ratio)).to(q.dtype).contiguous(), groups)
    terms = [
        None if each is None else _grouped(each, groups).to(q.dtype)
        for each in _row_terms(plan, rows, ratio, row_dot)
    ]
    if plan.is_whole:
        assert x is not None
        dq, dk, dv = tiles.whole_gradients(plan, inputs, scaled, terms, x, kept)
    else:
        dq, dk, dv = tiles.tiled_gradients(plan, inputs, scaled, terms)
    d_offset = None
    if offset is not None:
        # The offset's column is multiplied by a one in every key: its gradient is the sum of dS.
        d_offset = dq[..., width].reshape(q.shape[:3]).sum(2, dtype=sum_dtype(q))
    dq = dq[..., :width].to(q.dtype).reshape(q.shape)
    if plan.unit != 1:
        dq = dq * plan.unit
    return dq, _like(dk[..., :width], k), _like(dv, v), d_offset, row_dot, _is_spoilt(plan, dq)


def _row_terms(
    plan: Plan, rows: Incoming, ratio: Tensor | float, row_dot: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Numbers [B, H, Tq] of each row: one is added to the gradients of its x^power, the other is
    multiplied by ln x and added, too; None for zeros."""
    factor, grad_log = rows.factor, rows.grad_log
    terms = [] if rows.grad_sum is None else [rows.grad_sum * factor]
    if grad_log is not None:
        terms.append(grad_log * factor * (1 + _log(factor)))
    if plan.row_normalise:
        # The gradient of the row's sum, by which the row is divided.
        assert row_dot is not None
        terms.append(-row_dot * ratio)
    constant = sum(terms[1:], terms[0]) if terms else None
    return constant, None if grad_log is None else grad_log * factor * plan.power


def _is_spoilt(plan: Plan, result: Tensor) -> bool:
    """Whether a result is not finite and its products contained hidden keys or values."""
    return plan.may_mix_hidden and is_untraced(result) and not math.isfinite(result.sum())


def _tables(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, offset: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B * Hkv, G, Tq, D'], k and v [B * Hkv, Tk', .], with columns for the score offset.

    Keys that no batch element sees are cut off. For decoding, k and v are as in memory, which may
    be [B, Hkv, Tk, .].
    """
    if plan.unit != 1:
        q = q * plan.unit
    if offset is not None and not plan.adds_offset:
        q, k = _with_offset(q, k, offset)
    groups = q.shape[1] // k.shape[1]
    if plan.is_decoding:
        return _grouped(q, groups), _flat(k), _flat(v)
    # Products of strided tables are slower than these copies.
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    lengths = plan.visibility.key_lengths
    if lengths is not None and not plan.is_whole:
        longest = max(0, min(int(lengths.max()), k.shape[2])) if len(lengths) else 0
        is_padding = (torch.arange(longest, device=k.device) >= lengths[:, None])[:, None, :, None]
        k = k[:, :, :longest].masked_fill(is_padding, 0)
        v = v[:, :, :longest].masked_fill(is_padding, 0)
    return _grouped(q, groups), k.flatten(0, 1), v.flatten(0, 1)


def _with_offset(q: Tensor, k: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """q and k with further columns whose product is the offset [H] of each head.

    The product adds the offset before it rounds, so that in bfloat16 too the sign, which gates the
    gradient, is that of the exact difference. Three bfloat16 columns hold a float32.
    """
    rest, parts = offset, []
    for _ in range(3 if q.dtype == torch.bfloat16 else 1):
        parts.append(rest.to(q.dtype))
        rest = rest - parts[-1].to(rest.dtype)
    columns = torch.stack(parts, -1)[:, None].expand(*q.shape[:-1], len(parts))
    ones = k.new_ones((*k.shape[:-1], len(parts)))
    return torch.cat([q, columns], -1), torch.cat([k, ones], -1)


def _grouped(tensor: Tensor, groups: int) -> Tensor:
    """[B, H, Tq, ...] as [B * Hkv, G, Tq, ...]."""
    batch, heads = tensor.shape[:2]
    return tensor.reshape(batch * heads // groups, groups, *tensor.shape[2:])


def _flat(tensor: Tensor) -> Tensor:
    """[B, Hkv, Tk, .] as [B * Hkv, Tk, .] where that needs no copy."""
    is_dense = tensor.shape[0] <= 1 or tensor.stride(0) == tensor.shape[1] * tensor.stride(1)
    return tensor.flatten(0, 1) if is_dense else tensor


def _like(tables: Tensor, other: Tensor) -> Tensor:
    """[B * Hkv, keys, width] in shape and dtype of the other, with zeros for cut padding."""
    missing = other.shape[2] - tables.shape[1]
    if missing:
        tables = torch.nn.functional.pad(tables, (0, 0, 0, missing))
    return tables.to(other.dtype).reshape(other.shape)


def _column(factor: Tensor | float) -> Tensor | float:
    """A tensor [...] as [..., 1]; a number as it is."""
    return factor if isinstance(factor, float) else factor[..., None]


def _log(factor: Tensor | float) -> Tensor | float:
    return math.log(factor) if isinstance(factor, float) else factor.log()
