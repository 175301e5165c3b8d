"""The products of rectified attention on the CPU, over whole tables or in tiles.

A table is one key head of one batch element; k and v are [B * Hkv, Tk, .], and q is
[B * Hkv, G, Tq, D]. The row factors are applied elsewhere: here, with x = max(q.k, 0), a weight is
x^power.
"""

import math
from itertools import product
from typing import Any

import torch
from torch import Tensor

from reluformer.ops.backends.cpu.plan import Plan
from reluformer.ops.rule import raised

# Rows of a tile in the outer loop (queries forward, keys backward), and scores of a tile for each
# thread; bfloat16 products need large tiles.
ROWS = {torch.float32: 512, torch.float64: 512, torch.bfloat16: 1024}
SCORES = {torch.float32: 1 << 19, torch.float64: 1 << 18, torch.bfloat16: 1 << 21}

# Integers of the same size: any of them times zero is zero, and their sign is that of the float.
_INTEGERS = {
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.bfloat16: torch.int16,
}

Inputs = tuple[Tensor, Tensor, Tensor]
"""q, k and v as tables, or their gradients."""


def rectify_visible(plan: Plan, x: Tensor, visible: Tensor | None) -> None:
    """max(x, 0) in place, and 0 for hidden keys; x [B, H, Tq, Tk], visible broadcasts to it."""
    if visible is not None:
        # Integers times zero are zero, whatever hidden keys hold, and far faster than filling.
        x.view(_INTEGERS[x.dtype]).mul_(visible)
    elif plan.visibility.causal or plan.visibility.window is not None:
        _keep_band(x, *plan.band(slice(0, plan.rows), slice(0, plan.keys)))
    _rectify(x)


def tiled(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, sums: Tensor | None, logs: Tensor | None
) -> Tensor:
    """x^power times values, [B * Hkv, G, Tq, Dv]; row sums are added to `sums` and `logs`."""
    count, groups, n_q, _ = q.shape
    n_k = k.shape[1]
    out, scratch = q.new_empty((*q.shape[:3], v.shape[-1])), _Scratch()
    height, width, together = _tile_sizes(plan, q, n_q, n_k, 1)
    for tables in _slices(0, count, together):
        for head, rows in product(range(groups), _slices(0, n_q, height)):
            at = (tables, head, rows)
            low, high = plan.band(rows, slice(0, n_k))
            first, stop = max(0, low), min(n_k, high + rows.stop - rows.start)
            if first >= stop:
                out[at].zero_()
            for keys in _slices(first, stop, width):
                left, right = q[at], k[tables, keys].transpose(1, 2)
                x = torch.bmm(left, right, out=scratch.take("x", left, right))
                _keep_band(x, *plan.band(rows, keys))
                weight = raised(_rectify(x), plan.power)
                add_sums(weight, x, sums, logs, at)
                if keys.start == first:
                    torch.bmm(weight, v[tables, keys], out=out[at])
                else:
                    out[at].baddbmm_(weight, v[tables, keys])
    return out


def whole_gradients(
    plan: Plan,
    inputs: Inputs,
    grad: Tensor,
    terms: list[Tensor | None],
    x: Tensor,
    kept: Tensor | None,
) -> Inputs:
    """dq, dk and dv of the tables, from the output's gradient times C [B * Hkv, G, Tq, Dv]."""
    q, k, v = inputs
    rows, grad = q.flatten(1, 2), grad.flatten(1, 2)
    weight = raised(x, plan.power)
    ds = torch.bmm(grad, v.transpose(1, 2))
    if kept is not None:
        weight, ds = weight * kept, ds.mul_(kept)
    dv = torch.bmm(weight.transpose(1, 2), grad)
    columns = [None if term is None else term.flatten(1, 2)[..., None] for term in terms]
    _to_scores(plan, ds, x, *columns)
    return torch.bmm(ds, k), torch.bmm(ds.transpose(1, 2), rows), dv


def tiled_gradients(plan: Plan, inputs: Inputs, grad: Tensor, terms: list[Tensor | None]) -> Inputs:
    """dq, dk and dv of the tables, from the output's gradient times C [B * Hkv, G, Tq, Dv].

    Tiles are transposed, with a row for each key: then only one of the products with x and its
    gradient, dq, needs a transpose, which in bfloat16 costs as much as the product.
    """
    q, k, v = inputs
    count, groups, n_q, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (each.new_zeros(each.shape, dtype=wide) for each in inputs)
    scratch = _Scratch()
    height, width, together = _tile_sizes(plan, q, k.shape[1], n_q, 2)
    for tables in _slices(0, count, together):
        for keys, head in product(_slices(0, k.shape[1], height), range(groups)):
            part = (tables, keys)
            low, high = plan.band(slice(0, n_q), keys)
            first, stop = max(0, -high), min(n_q, keys.stop - keys.start - low)
            for rows in _slices(first, stop, width):
                at = (tables, head, rows)
                left, right = k[part], q[at].transpose(1, 2)
                x = torch.bmm(left, right, out=scratch.take("x", left, right))
                low, high = plan.band(rows, keys)
                _keep_band(x, -high, -low)
                _rectify(x)
                left, right = v[part], grad[at].transpose(1, 2)
                ds = torch.bmm(left, right, out=scratch.take("ds", left, right))
                dv[part] += torch.bmm(raised(x, plan.power), grad[at])
                _to_scores(plan, ds, x, *(t if t is None else t[at][:, None] for t in terms))
                dk[part] += torch.bmm(ds, q[at])
                dq[at] += torch.bmm(ds.transpose(1, 2), k[part])
    return dq, dk, dv


def _to_scores(
    plan: Plan, ds: Tensor, x: Tensor, constant: Tensor | None, log_slope: Tensor | None
) -> None:
    """Turn the gradient of the weights, in place, into that of the scores."""
    if constant is not None:
        ds += constant
    if log_slope is not None:
        ds += log_slope * torch.where(x > 0, x, 1.0).log_()
    torch.ops.aten.threshold_backward.grad_input(ds, x, 0, grad_input=ds)
    if plan.power > 1:
        ds.mul_(raised(x, plan.power - 1)).mul_(plan.power)


class _Scratch:
    """Memory that all tiles share, by name."""

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}

    def take(self, name: str, left: Tensor, right: Tensor) -> Tensor:
        """Memory for the product of left [N, a, b] and right [N, b, c]."""
        shape = (left.shape[0], left.shape[1], right.shape[2])
        size = math.prod(shape)
        buffer = self.buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self.buffers[name] = left.new_empty(size)
        return buffer[:size].view(shape)


def _tile_sizes(plan: Plan, q: Tensor, tall: int, wide: int, tiles: int) -> tuple[int, int, int]:
    """Height and width of a tile and its number of tables; `tiles` tiles fill the cache."""
    scores = SCORES[q.dtype] // tiles
    # A causal edge wastes half of the tile it crosses.
    height = max(1, min(ROWS[q.dtype] // (2 if plan.visibility.causal else 1), tall))
    width = max(1, min(scores // height, wide))
    return height, width, max(1, scores * torch.get_num_threads() // (height * width))


def _slices(start: int, stop: int, size: int) -> list[slice]:
    return [slice(at, min(at + size, stop)) for at in range(start, stop, size)]


def _keep_band(x: Tensor, low: int, high: int) -> None:
    """Set x [..., rows, columns] to zero where column - row is outside low to high."""
    if low > 1 - x.shape[-2]:
        x.triu_(low)
    if high < x.shape[-1] - 1:
        x.tril_(high)


def _rectify(x: Tensor) -> Tensor:
    if x.dtype == torch.bfloat16:
        # Integers are much faster.
        x.view(torch.int16).clamp_min_(0)
        return x
    return x.relu_()


def add_sums(
    weight: Tensor, x: Tensor, sums: Tensor | None, logs: Tensor | None, at: Any = slice(None)
) -> None:
    """Add the row sums of x^power to sums[at], and those of x^power ln x to logs[at]."""
    if sums is not None:
        sums[at] += weight.sum(-1, dtype=sums.dtype).view(sums[at].shape)
    if logs is not None:
        products = torch.special.xlogy(weight.to(logs.dtype), x.to(logs.dtype))
        logs[at] += products.sum(-1).view(logs[at].shape)


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """Products of [B * Hkv, ., .]; one of them may be a strided [B, Hkv, ., .]."""
    if left.dim() == right.dim():
        return torch.bmm(left, right)
    # A KV cache is read once: a copy into one table would cost more than the product.
    batch = max(left, right, key=Tensor.dim).shape[0]
    lefts = left if left.dim() == 4 else left.chunk(batch)
    rights = right if right.dim() == 4 else right.chunk(batch)
    products = []
    for one, other in zip(lefts, rights, strict=True):
        products.append(torch.bmm(one, other))
    return torch.cat(products)
