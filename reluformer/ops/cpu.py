"""Rectified attention on the CPU: tiles of plain torch, memory linear in the lengths.

Without softmax a tile needs no running maximum and no rescaling: its product with the values is
simply added. As on the GPU the loop knows neither scale nor normaliser; with x = max(q.k - t, 0) a
weight is C_i x^power and C_i multiplies each output row once. Heads are batched; the query heads of
a group are rows of one product.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reluformer.errors import UserError

# Rows and columns of a tile: large enough for the matrix product, small enough for the L2 cache.
ROWS, COLUMNS = 256, 512
# Up to this many rows (decoding) a whole line of scores is cheaper than a loop.
FEW_ROWS = 16


@dataclass(frozen=True)
class _Plan:
    """What a call is, apart from tensors that get gradients; heads are grouped [B, Hkv, G, ...]."""

    scale: float
    gamma: float
    threshold: float
    length_exponent: float
    power: int
    causal: bool
    window: int | None
    key_lengths: Tensor | None
    mask: Tensor | None
    dropout_p: float
    statistics: int
    seed: int


@dataclass(frozen=True)
class _Tile:
    rows: slice
    cols: slice
    # Which pairs are visible, [B, Hkv, G, rows, cols] or broadcastable to it; None: all.
    seen: Tensor | None
    number: int


def rectified_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    gamma: float | Tensor,
    length_exponent: float,
    power: int,
    threshold: float | Tensor,
    causal: bool,
    window: int | None,
    key_lengths: Tensor | None,
    mask: Tensor | None,
    dropout_p: float,
    statistics: int,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Attention with weights max(s - threshold, 0)^power / (gamma (n / 2)^length_exponent).

    q [B, H, Tq, D], k [B, Hkv, Tk, D], v [B, Hkv, Tk, Dv] in float32, float64 or bfloat16; the
    other arguments and the results are those of `reluformer.ops.triton.op.rectified_attention`.
    Statistics are float32, float64 for float64 inputs.
    """
    if not scale > 0:
        raise UserError(f"impl='cpu' needs a positive scale, not {scale}.")
    if power not in (1, 2):
        raise UserError(f"impl='cpu' takes power 1 or 2, not {power}.")
    batch, heads, n_q, _ = q.shape
    groups = heads // k.shape[1]
    if mask is not None:
        mask = mask.expand(batch, heads, n_q, k.shape[2]).unflatten(1, (-1, groups))  # type: ignore[no-untyped-call]
    plan = _Plan(
        scale,
        1.0 if isinstance(gamma, Tensor) else float(gamma),
        0.0 if isinstance(threshold, Tensor) else float(threshold),
        length_exponent,
        power,
        causal,
        window,
        key_lengths,
        mask,
        dropout_p,
        statistics,
        int(torch.randint(1 << 40, ())) if dropout_p > 0 else 0,
    )
    per_head = [
        value.expand(heads).view(-1, groups) if isinstance(value, Tensor) else None
        for value in (gamma, threshold)
    ]
    grouped = q.unflatten(1, (-1, groups))  # type: ignore[no-untyped-call]
    out, row_sum, log_sum = _Attention.apply(plan, grouped, k, v, *per_head)  # type: ignore[no-untyped-call]
    out = out.flatten(1, 2)
    if not statistics:
        return out, None, None
    return out, row_sum.flatten(1, 2), log_sum.flatten(1, 2) if statistics == 2 else None


class _Attention(torch.autograd.Function):
    """q [B, Hkv, G, Tq, D]; gamma and threshold [Hkv, G] or None."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: _Plan,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gamma: Tensor | None,
        threshold: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        exact = _sum_dtype(q)
        shape = q.shape[:-1]
        out = q.new_empty((*shape, v.shape[-1]))
        sums, logs = (torch.zeros(shape if plan.statistics else (0,), dtype=exact) for _ in "12")
        factor = _factor(plan, q, k, gamma)
        score_q, score_k = _with_threshold(plan, q, k, threshold)
        for rows in _row_slices(q, k):
            part: Tensor | None = None
            for tile in _tiles(plan, q, k, rows):
                x = _rectified_scores(score_q, score_k, tile)
                weight = x.square() if plan.power == 2 else x
                if plan.statistics:
                    wide = weight.to(exact)
                    sums[..., rows] += wide.sum(-1)
                    logs[..., rows] += torch.special.xlogy(wide, x.to(exact)).sum(-1)
                if plan.dropout_p:
                    weight = weight * _kept(plan, weight, tile)
                read = _times(weight, v[:, :, tile.cols])
                part = read if part is None else part + read
            if part is None:
                out[..., rows, :] = 0
            else:
                out[..., rows, :] = part * factor[..., rows, None].to(part.dtype)
        if plan.statistics:
            logs = factor * (_log(factor) * sums + plan.power * logs)
            sums = factor * sums
        ctx.plan = plan
        needs_results = ctx.needs_input_grad[4]
        ctx.save_for_backward(
            q, k, v, gamma, threshold, *((out, sums, logs) if needs_results else (None,) * 3)
        )
        ctx.set_materialize_grads(False)
        return out, sums, logs

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, grad_sum: Tensor | None, grad_log: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        q, k, v, gamma, threshold, out, sums, logs = ctx.saved_tensors
        plan: _Plan = ctx.plan
        exact = _sum_dtype(q)
        if grad is None:
            grad = q.new_zeros((*q.shape[:-1], v.shape[-1]))
        factor = _factor(plan, q, k, gamma)
        score_q, score_k = _with_threshold(plan, q, k, threshold)
        constant, slope = _row_terms(plan, factor, grad_sum, grad_log)
        scaled = grad * factor[..., None].to(grad.dtype)
        dq = torch.zeros(q.shape, dtype=q.dtype)
        dk, dv = torch.zeros(k.shape, dtype=exact), torch.zeros(v.shape, dtype=exact)
        shift = torch.zeros(q.shape[1:3], dtype=exact)
        for rows in _row_slices(q, k):
            part: Tensor | None = None
            for tile in _tiles(plan, q, k, rows):
                x = _rectified_scores(score_q, score_k, tile)
                weight = x.square() if plan.power == 2 else x
                ds = _times(scaled[..., rows, :], v[:, :, tile.cols].transpose(-2, -1))
                if plan.dropout_p:
                    kept = _kept(plan, weight, tile)
                    weight, ds = weight * kept, ds.mul_(kept)
                dv[:, :, tile.cols] += _collect(weight, scaled[..., rows, :])
                if constant is not None:
                    ds += constant[..., rows, None].to(ds.dtype)
                if slope is not None:
                    logs_x = torch.where(x > 0, x, 1.0).log()
                    ds += slope[..., rows, None].to(ds.dtype) * logs_x
                ds = torch.ops.aten.threshold_backward(ds, x, 0)
                if plan.power == 2:
                    ds.mul_(x)
                if threshold is not None:
                    shift += ds.sum((-2, -1), dtype=exact).sum(0)
                dk[:, :, tile.cols] += _collect(ds, q[..., rows, :])
                read = _times(ds, k[:, :, tile.cols])
                part = read if part is None else part + read
            if part is not None:
                dq[..., rows, :] = part * plan.power
        dk *= plan.power
        d_gamma = d_threshold = None
        if ctx.needs_input_grad[4]:
            dot = (out.to(exact) * grad.to(exact)).sum(-1)
            if grad_sum is not None:
                dot += grad_sum * sums
            if grad_log is not None:
                dot += grad_log * (sums + logs)
            d_gamma = (-dot.sum((0, 3)) / gamma).to(gamma.dtype)
        if ctx.needs_input_grad[5]:
            d_threshold = (-shift * (plan.power / plan.scale)).to(threshold.dtype)
        return None, dq, dk.to(k.dtype), dv.to(v.dtype), d_gamma, d_threshold


def _sum_dtype(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def _times(rows: Tensor, table: Tensor) -> Tensor:
    """[B, Hkv, G, r, x] times [B, Hkv, x, y], the group's heads as rows of one product."""
    batch, kv_heads, groups, count, _ = rows.shape
    flat = rows.reshape(batch * kv_heads, groups * count, rows.shape[-1])
    product = torch.bmm(flat, table.reshape(batch * kv_heads, *table.shape[2:]))
    return product.view(batch, kv_heads, groups, count, table.shape[-1])


def _collect(weight: Tensor, rows: Tensor) -> Tensor:
    """sum over group and row of weight [B, Hkv, G, r, c] times rows [B, Hkv, G, r, y]."""
    batch, kv_heads = weight.shape[:2]
    left = weight.reshape(batch * kv_heads, -1, weight.shape[-1]).transpose(1, 2)
    right = rows.reshape(batch * kv_heads, -1, rows.shape[-1])
    return torch.bmm(left, right).view(batch, kv_heads, weight.shape[-1], rows.shape[-1])


def _with_threshold(
    plan: _Plan, q: Tensor, k: Tensor, threshold: Tensor | None
) -> tuple[Tensor, Tensor]:
    """q and k with columns whose product is -threshold / scale, if there is a threshold.

    The product subtracts it before it rounds, so that in bfloat16 too the sign, which gates the
    gradient, is that of the exact difference. Three parts hold a float32 in bfloat16.
    """
    if threshold is None and not plan.threshold:
        return q, k
    exact = _sum_dtype(q)
    rest = torch.full(q.shape[1:3], -plan.threshold / plan.scale, dtype=exact)
    if threshold is not None:
        rest = rest - threshold.detach().to(exact) / plan.scale
    parts = []
    for _ in range(3 if q.dtype == torch.bfloat16 else 1):
        parts.append(rest.to(q.dtype))
        rest = rest - parts[-1].to(exact)
    columns = torch.stack(parts, -1)[:, :, None].expand(*q.shape[:-1], len(parts))
    ones = torch.ones((*k.shape[:-1], len(parts)), dtype=k.dtype)
    return torch.cat([q, columns], -1), torch.cat([k, ones], -1)


def _rectified_scores(q: Tensor, k: Tensor, tile: _Tile) -> Tensor:
    """x [B, Hkv, G, rows, cols] of what `_with_threshold` gives, zero where hidden."""
    x = _times(q[..., tile.rows, :], k[:, :, tile.cols].transpose(-2, -1)).relu_()
    return x if tile.seen is None else x.masked_fill_(~tile.seen, 0)


def _row_slices(q: Tensor, k: Tensor) -> Iterator[slice]:
    for start in range(0, q.shape[-2] if k.shape[-2] else 0, ROWS):
        yield slice(start, min(start + ROWS, q.shape[-2]))
    if not k.shape[-2] and q.shape[-2]:
        yield slice(0, q.shape[-2])


def _tiles(plan: _Plan, q: Tensor, k: Tensor, rows: slice) -> Iterator[_Tile]:
    """The tiles that some of these rows can see."""
    n_q, n_k = q.shape[-2], k.shape[-2]
    first, last = rows.start + n_k - n_q, rows.stop - 1 + n_k - n_q
    low, high = 0, n_k
    if plan.key_lengths is not None:
        high = min(high, max(int(plan.key_lengths.max()), 0))
    if plan.causal:
        high = min(high, last + 1)
    if plan.window is not None:
        low, high = max(0, first - plan.window + 1), min(high, last + plan.window)
    few = (rows.stop - rows.start) * q.shape[2] <= FEW_ROWS
    width = max(high - low, 1) if few else COLUMNS
    for start in range(low, high, width):
        cols = slice(start, min(start + width, high))
        yield _Tile(rows, cols, _seen(plan, rows, cols, n_k - n_q), rows.start * n_k + start)


def _seen(plan: _Plan, rows: slice, cols: slice, offset: int) -> Tensor | None:
    col = torch.arange(cols.start, cols.stop)
    position = torch.arange(rows.start, rows.stop)[:, None] + offset
    seen: Tensor | None = None

    def both(one: Tensor | None, other: Tensor) -> Tensor:
        return other if one is None else one & other

    if plan.causal and cols.stop - 1 > rows.start + offset:
        seen = both(seen, col <= position)
    if plan.window is not None:
        seen = both(seen, (position - col).abs() < plan.window)
    if plan.key_lengths is not None and cols.stop > int(plan.key_lengths.min()):
        seen = both(seen, col < plan.key_lengths[:, None, None, None, None])
    if plan.mask is not None:
        seen = both(seen, plan.mask[..., rows, cols])
    return seen


def _counts(plan: _Plan, q: Tensor, k: Tensor) -> Tensor:
    """n [B, Hkv, G, Tq] or broadcastable: how many keys each row sees."""
    n_q, n_k = q.shape[-2], k.shape[-2]
    if plan.mask is not None:
        counts = torch.zeros(q.shape[:-1], dtype=torch.long)
        for rows in _row_slices(q, k):
            for tile in _tiles(plan, q, k, rows):
                if tile.seen is not None:
                    counts[..., rows] += tile.seen.sum(-1)
        return counts
    position = torch.arange(n_q) + n_k - n_q
    end: Tensor = torch.full((1, 1, 1, 1), n_k)
    if plan.key_lengths is not None:
        end = plan.key_lengths.clamp(0, n_k)[:, None, None, None]
    low, high = torch.zeros_like(position), end
    if plan.causal:
        high = torch.minimum(high, position + 1)
    if plan.window is not None:
        low = (position - plan.window + 1).clamp(min=0)
        high = torch.minimum(high, position + plan.window)
    return (high - low).clamp(min=0)


def _factor(plan: _Plan, q: Tensor, k: Tensor, gamma: Tensor | None) -> Tensor:
    """C_i [B, Hkv, G, Tq] (an expanded view), zero for a row that sees nothing."""
    counts = _counts(plan, q, k)
    length = (counts.clamp(min=1).to(_sum_dtype(q)) / 2) ** plan.length_exponent
    factor = plan.scale**plan.power / (plan.gamma * length)
    if gamma is not None:
        factor = factor / gamma.to(factor.dtype)[:, :, None]
    return torch.where(counts > 0, factor, 0.0).expand(q.shape[:-1])


def _log(factor: Tensor) -> Tensor:
    return torch.where(factor > 0, factor, 1.0).log()


def _row_terms(
    plan: _Plan, factor: Tensor, grad_sum: Tensor | None, grad_log: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """What the statistics add to dL/dx before its slope: a constant, and a multiple of log x."""
    if not plan.statistics or (grad_sum is None and grad_log is None):
        return None, None
    constant = torch.zeros_like(factor) if grad_sum is None else grad_sum * factor
    if grad_log is None:
        return constant, None
    return constant + grad_log * factor * (1 + _log(factor)), grad_log * factor * plan.power


def _kept(plan: _Plan, weight: Tensor, tile: _Tile) -> Tensor:
    """0 or 1 / (1 - p), the same for a tile in the forward and in the backward pass."""
    generator = torch.Generator().manual_seed(plan.seed + tile.number)
    kept = torch.empty(weight.shape, dtype=weight.dtype).bernoulli_(
        1 - plan.dropout_p, generator=generator
    )
    return kept.div_(1 - plan.dropout_p)
