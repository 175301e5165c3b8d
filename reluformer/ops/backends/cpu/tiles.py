"""The products of rectified attention on the CPU, over whole tables or in tiles.

A table is a key head of an element of the batch; k and v are [B * Hkv, Tk, .], and q is
[B * Hkv, G, Tq, D]. Scale, threshold and normaliser are no matter here: with x = max(q.k, 0) a
weight is x^power.
"""

import math
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reluformer.ops.rule import raised
from reluformer.ops.visibility import Visibility

# Rows of a tile in the outer loop (queries forward, keys backward), and scores of a tile for one
# thread: bfloat16 products need large ones.
ROWS = {torch.float32: 512, torch.float64: 512, torch.bfloat16: 1024}
SCORES = {torch.float32: 1 << 19, torch.float64: 1 << 18, torch.bfloat16: 1 << 21}

# With fewer queries, or no more scores a head that training keeps, there is one tile.
MANY_ROWS, SHORT = 16, 1 << 18

# As integers, numbers times zero are zero whatever they are, and negative ones are negative.
_INTEGERS = {
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.bfloat16: torch.int16,
}


class Plan(NamedTuple):
    """What a call is, apart from tensors that get gradients."""

    scale: float
    gamma: float
    threshold: float
    length_exponent: float
    power: int
    rules: Visibility
    dropout_p: float
    statistics: int
    row_normalise: float
    """What is added to the sum of a row before its output is divided by it; 0: it is not."""
    keys: int
    """Tk, padding included."""
    offset: int
    """Tk - Tq: row i stands at key i + offset."""
    whole: bool
    """Whether there is one tile."""
    trained: bool
    compiled: bool
    """Whether the compiled kernels run it, not these tiles."""

    def band(self, rows: slice, keys: slice) -> tuple[int, int]:
        """The least and the greatest (key - row), counted within the tile, that is visible."""
        low, high = -(1 << 60), 1 << 60
        diagonal = rows.start + self.offset - keys.start
        if self.rules.causal:
            high = diagonal
        if self.rules.window is not None:
            low = diagonal - self.rules.window + 1
            high = min(high, diagonal + self.rules.window - 1)
        return low, high

    def keys_of(self, rows: slice, count: int) -> tuple[int, int]:
        """From which to which of `count` keys some of the rows see."""
        low, high = self.band(rows, slice(0, count))
        return max(0, low), min(count, high + rows.stop - rows.start)

    def rows_of(self, keys: slice, count: int) -> tuple[int, int]:
        """From which to which of `count` rows see some of the keys."""
        low, high = self.band(slice(0, count), keys)
        return max(0, -high), min(count, keys.stop - keys.start - low)


def whole_scores(
    plan: Plan, q: Tensor, k: Tensor, visible: Tensor | None, heads: int, opening: Tensor | None
) -> Tensor:
    """x [B * Hkv, G * Tq, Tk]; visible broadcasts to [B, H, Tq, Tk], opening [H] is added."""
    rows, n_q = q.flatten(1, 2), q.shape[2]
    if q.dtype == torch.bfloat16 and n_q < MANY_ROWS:
        # A few rows times a transposed table of bfloat16 can take four times as long as this.
        x = multiply(k, rows.transpose(1, 2)).transpose(1, 2).contiguous()
    else:
        x = multiply(rows, k.transpose(-1, -2))
    batch = rows.shape[0] * q.shape[1] // heads
    if opening is not None:
        by_head = x.view(batch, heads, n_q, plan.keys)
        by_head.add_(opening.to(x.dtype).view(heads, 1, 1))
    if visible is None:
        if plan.rules.causal or plan.rules.window is not None:
            by_head = x.view(*q.shape[:3], plan.keys)
            _cut(by_head, *plan.band(slice(0, n_q), slice(0, plan.keys)))
    else:
        # Far faster than filling, and as deaf to what hidden keys hold.
        by_head = x.view(batch, heads, n_q, plan.keys)
        by_head.view(_INTEGERS[x.dtype]).mul_(visible)
    return _rectify(x)


def tiled(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, sums: Tensor | None, logs: Tensor | None
) -> Tensor:
    """Weights times values [B * Hkv, G, Tq, Dv], statistics added to theirs; no C anywhere."""
    count, groups, n_q, _ = q.shape
    out, memory = q.new_empty((*q.shape[:3], v.shape[-1])), _Memory()
    height, width, together = _tile(plan, q, n_q, k.shape[1], 1)
    for tables in _steps(0, count, together):
        for head, rows in product(range(groups), _steps(0, n_q, height)):
            at = (tables, head, rows)
            low, high = plan.keys_of(rows, k.shape[1])
            if low >= high:
                out[at].zero_()
            for keys in _steps(low, high, width):
                x = memory.product("x", q[at], k[tables, keys].transpose(1, 2))
                _cut(x, *plan.band(rows, keys))
                weight = weigh(plan, _rectify(x), sums, logs, at)
                if keys.start == low:
                    torch.bmm(weight, v[tables, keys], out=out[at])
                else:
                    out[at].baddbmm_(weight, v[tables, keys])
    return out


def whole_gradients(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    terms: list[Tensor | None],
    x: Tensor,
    kept: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of the tables, from the output's gradient times C [B * Hkv, G, Tq, Dv]."""
    rows, grad = q.flatten(1, 2), grad.flatten(1, 2)
    weight = raised(x, plan.power)
    ds = torch.bmm(grad, v.transpose(1, 2))
    if kept is not None:
        weight, ds = weight * kept, ds.mul_(kept)
    dv = torch.bmm(weight.transpose(1, 2), grad)
    _to_scores(plan, ds, x, *(t if t is None else t.flatten(1, 2)[..., None] for t in terms))
    return torch.bmm(ds, k), torch.bmm(ds.transpose(1, 2), rows), dv


def tiled_gradients(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, terms: list[Tensor | None]
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of the tables, from the output's gradient times C [B * Hkv, G, Tq, Dv].

    Tiles lie on their side, a row for each key: then only one of the products with x and its
    gradient, dq, needs a transpose, which in bfloat16 costs as much as the product.
    """
    count, groups, n_q, _ = q.shape
    dq, dk, dv = (
        torch.zeros(each.shape, dtype=torch.promote_types(q.dtype, torch.float32))
        for each in (q, k, v)
    )
    memory = _Memory()
    height, width, together = _tile(plan, q, k.shape[1], n_q, 2)
    for tables in _steps(0, count, together):
        for keys, head in product(_steps(0, k.shape[1], height), range(groups)):
            part = (tables, keys)
            for rows in _steps(*plan.rows_of(keys, n_q), width):
                at = (tables, head, rows)
                x = memory.product("x", k[part], q[at].transpose(1, 2))
                low, high = plan.band(rows, keys)
                _cut(x, -high, -low)
                _rectify(x)
                ds = memory.product("ds", v[part], grad[at].transpose(1, 2))
                dv[part] += torch.bmm(raised(x, plan.power), grad[at])
                _to_scores(plan, ds, x, *(t if t is None else t[at][:, None] for t in terms))
                dk[part] += torch.bmm(ds, q[at])
                dq[at] += torch.bmm(ds.transpose(1, 2), k[part])
    return dq, dk, dv


def _to_scores(
    plan: Plan, ds: Tensor, x: Tensor, constant: Tensor | None, slope: Tensor | None
) -> None:
    """Turn the gradient of the weights, in place, into that of the scores."""
    if constant is not None:
        ds += constant
    if slope is not None:
        ds += slope * torch.where(x > 0, x, 1.0).log_()
    torch.ops.aten.threshold_backward.grad_input(ds, x, 0, grad_input=ds)
    if plan.power > 1:
        ds.mul_(raised(x, plan.power - 1)).mul_(plan.power)


class _Memory:
    """Scratch that every tile uses again."""

    def __init__(self) -> None:
        self.held: dict[str, Tensor] = {}

    def product(self, name: str, left: Tensor, right: Tensor) -> Tensor:
        """left [N, a, b] times right [N, b, c]."""
        shape = (left.shape[0], left.shape[1], right.shape[2])
        size = math.prod(shape)
        held = self.held.get(name)
        if held is None or held.numel() < size:
            held = self.held[name] = left.new_empty(size)
        return torch.bmm(left, right, out=held[:size].view(shape))


def _tile(plan: Plan, q: Tensor, tall: int, wide: int, at_work: int) -> tuple[int, int, int]:
    """Height and width of tiles, and how many tables share one; `at_work` tiles fill the cache."""
    scores = SCORES[q.dtype] // at_work
    # Half of what a causal edge runs through is in vain.
    height = max(1, min(ROWS[q.dtype] // (2 if plan.rules.causal else 1), tall))
    width = max(1, min(scores // height, wide))
    return height, width, max(1, scores * torch.get_num_threads() // (height * width))


def _steps(start: int, stop: int, size: int) -> Iterator[slice]:
    for at in range(start, stop, size):
        yield slice(at, min(at + size, stop))


def _cut(x: Tensor, low: int, high: int) -> None:
    """Zeros in x [..., rows, columns] where column - row is not from low to high."""
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


def weigh(
    plan: Plan, x: Tensor, sums: Tensor | None, logs: Tensor | None, at: Any = slice(None)
) -> Tensor:
    """x^power; its row sums, and those of x^power log x, are added to the statistics at `at`."""
    weight = raised(x, plan.power)
    if sums is not None:
        sums[at] += weight.sum(-1, dtype=sums.dtype).view(sums[at].shape)
    if logs is not None:
        products = torch.special.xlogy(weight.to(logs.dtype), x.to(logs.dtype))
        logs[at] += products.sum(-1).view(logs[at].shape)
    return weight


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """Products of [B * Hkv, ., .]; one of both may be [B, Hkv, ., .] as it lies in memory."""
    if left.dim() == right.dim():
        return torch.bmm(left, right)
    # A cache is read once: to copy it into one table would cost more than the product.
    batch = max(left, right, key=Tensor.dim).shape[0]
    parts = (each if each.dim() == 4 else each.chunk(batch) for each in (left, right))
    return torch.cat([torch.bmm(a, b) for a, b in zip(*parts, strict=True)])
