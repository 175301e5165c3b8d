"""Rectified attention on the CPU: strips of plain torch, memory linear in the lengths.

Without softmax a tile needs no running maximum and no rescaling: its product with the values is
simply added. As on the GPU the loop knows neither scale nor normaliser; with x = max(q.k - t, 0) a
weight is C_i x^power and C_i multiplies each output row once. A strip is a few query rows against
all keys they see, or a few thousand of them, so that scores never leave the cache. Padding is rows
of zeros, which weigh nothing, and the causal edge is a triangle: no mask is ever built.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reluformer.errors import UserError
from reluformer.ops.visibility import Visibility

# Query rows of a strip, and scores of a tile for one thread (bfloat16 products need large ones).
ROWS = {torch.float32: 256, torch.float64: 256, torch.bfloat16: 512}
SCORES = {torch.float32: 1 << 18, torch.float64: 1 << 17, torch.bfloat16: 1 << 21}


# From this many queries on, tables are copied to lie together; with fewer, large ones never are.
MANY_ROWS, LARGE = 16, 1 << 16


class _Plan(NamedTuple):
    """What a call is, apart from tensors that get gradients; tables are [B * Hkv, ...]."""

    scale: float
    gamma: float
    threshold: float
    length_exponent: float
    power: int
    causal: bool
    window: int | None
    key_lengths: Tensor | None
    dropout_p: float
    statistics: int
    seed: int
    keys: int
    """Tk, padding included."""
    offset: int
    """Tk - Tq: row i stands at key i + offset."""


class _Strip(NamedTuple):
    """Some rows of some heads of some tables, and the keys that some of them see."""

    tables: slice
    heads: slice
    rows: slice
    low: int
    high: int
    width: int
    """Keys of a tile."""

    @property
    def at(self) -> tuple[slice, slice, slice]:
        """Index into [tables, G, Tq, ...]."""
        return self.tables, self.heads, self.rows

    def tiles(self) -> Iterator[slice]:
        """The keys, in parts."""
        for start in range(self.low, self.high, self.width):
            yield slice(start, min(start + self.width, self.high))


def supports(q: Tensor, *, scale: float, masked: bool) -> str | None:
    """None if this path can run the call, else the reason."""
    if q.device.type != "cpu":
        return f"it needs CPU tensors, and q is on {q.device.type}"
    if q.dtype not in ROWS:
        return f"it takes float32, float64 or bfloat16, got {q.dtype}"
    if masked:
        return "it takes no mask"
    if not scale > 0:
        return f"scale must be positive, got {scale}"
    if torch.compiler.is_compiling():
        return "its loops are not for compilers"
    return None


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
    Statistics are float32, float64 for float64 inputs. In bfloat16 a NaN score counts as zero.
    """
    if not scale > 0:
        raise UserError(f"impl='cpu' needs a positive scale, not {scale}.")
    if power not in (1, 2):
        raise UserError(f"impl='cpu' takes power 1 or 2, not {power}.")
    if mask is not None:
        raise UserError("impl='cpu' takes no mask; use key_lengths, causal or window.")
    heads = q.shape[1]
    plan = _Plan(
        scale,
        1.0 if isinstance(gamma, Tensor) else float(gamma),
        0.0 if isinstance(threshold, Tensor) else float(threshold),
        length_exponent,
        power,
        causal,
        window,
        key_lengths,
        dropout_p,
        statistics,
        int(torch.randint(1 << 40, ())) if dropout_p > 0 else 0,
        k.shape[2],
        k.shape[2] - q.shape[2],
    )
    per_head = [
        value.expand(heads) if isinstance(value, Tensor) else None for value in (gamma, threshold)
    ]
    if torch.is_grad_enabled() and any(
        each is not None and each.requires_grad for each in (q, k, v, *per_head)
    ):
        out, row_sum, log_sum = _Attention.apply(plan, q, k, v, *per_head)  # type: ignore[no-untyped-call]
        return out, row_sum, log_sum
    if q.shape[0] > 1 and q.shape[2] < MANY_ROWS and k[0].numel() >= LARGE and not _one_table(k, v):
        # Decoding reads a cache once: a copy into one table would cost more than it.
        parts = [
            _forward(_of_element(plan, at), q[at, None], k[at, None], v[at, None], *per_head)
            for at in range(q.shape[0])
        ]
        return tuple(None if x[0] is None else torch.cat(x) for x in zip(*parts, strict=True))  # type: ignore
    return _forward(plan, q, k, v, *per_head)


def _one_table(*tensors: Tensor) -> bool:
    """Whether [B, Hkv, ...] are [B * Hkv, ...] as they lie in memory."""
    return all(each.stride(0) == each.shape[1] * each.stride(1) for each in tensors)


def _of_element(plan: _Plan, at: int) -> _Plan:
    """The plan of one element of the batch."""
    lengths = plan.key_lengths
    return plan if lengths is None else plan._replace(key_lengths=lengths[at, None])


def _forward(
    plan: _Plan, q: Tensor, k: Tensor, v: Tensor, gamma: Tensor | None, threshold: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Output, row sums, sums of w log w."""
    exact = _sum_dtype(q)
    tables_q, tables_k, tables_v = _tables(plan, q, k, v, threshold)
    out = q.new_empty((*tables_q.shape[:3], v.shape[-1]))
    sums, logs = (
        torch.zeros(tables_q.shape[:3], dtype=exact) if plan.statistics >= level else None
        for level in (1, 2)
    )
    memory = _Memory()
    for strip in _strips(plan, tables_q, tables_k, SCORES[q.dtype]):
        rows, read = _flat(tables_q, strip), _flat(out, strip)
        if strip.low >= strip.high:
            read.zero_()
        for cols in strip.tiles():
            x = _rectified_scores(plan, memory, strip, rows, tables_k, cols)
            weight = x.square() if plan.power == 2 else x
            if sums is not None:
                _flat(sums, strip).add_(weight.sum(-1, dtype=exact))
            if logs is not None:
                products = torch.special.xlogy(weight.to(exact), x.to(exact))
                _flat(logs, strip).add_(products.sum(-1))
            if plan.dropout_p:
                weight = weight * _kept(plan, weight, strip, cols)
            _product(read, weight, tables_v[strip.tables, cols], add=cols.start > strip.low)
    factor = _factor(plan, q, gamma)
    out = out.view(*q.shape[:3], v.shape[-1]).mul_(_column(factor))
    if sums is not None:
        sums = sums.view(q.shape[:3])
        if logs is not None:
            logs = factor * (_log(factor) * sums + plan.power * logs.view(q.shape[:3]))
        sums = factor * sums
    return out, sums, logs


class _Attention(torch.autograd.Function):
    """q [B, H, Tq, D], k and v [B, Hkv, Tk, .], gamma and threshold [H] or None."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: _Plan,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gamma: Tensor | None,
        threshold: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        out, sums, logs = _forward(plan, q, k, v, gamma, threshold)
        ctx.plan = plan
        kept = (out, sums, logs) if ctx.needs_input_grad[4] else (None, None, None)
        ctx.save_for_backward(q, k, v, gamma, threshold, *kept)
        ctx.set_materialize_grads(False)
        return out, sums, logs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad: Tensor | None, grad_sum: Tensor | None, grad_log: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        q, k, v, gamma, threshold, out, sums, logs = ctx.saved_tensors
        plan: _Plan = ctx.plan
        exact, width, groups = _sum_dtype(q), q.shape[-1], q.shape[1] // k.shape[1]
        if grad is None:
            grad = q.new_zeros((*q.shape[:-1], v.shape[-1]))
        factor = _factor(plan, q, gamma)
        tables_q, tables_k, tables_v = _tables(plan, q, k, v, threshold)
        scaled = _grouped((grad * _column(factor)).to(q.dtype), groups)
        constant, slope = (
            None if each is None else _grouped(each, groups).to(q.dtype)
            for each in _row_terms(plan, factor, grad_sum, grad_log)
        )
        dq = torch.zeros_like(tables_q)
        dk, dv = (torch.zeros(each.shape, dtype=exact) for each in (tables_k, tables_v))
        memory = _Memory()
        # Two tiles are at work here; dropout needs those of the forward pass.
        scores = SCORES[q.dtype] // (1 if plan.dropout_p else 2)
        for strip in _strips(plan, tables_q, tables_k, scores):
            rows, grads, read = _flat(tables_q, strip), _flat(scaled, strip), _flat(dq, strip)
            for cols in strip.tiles():
                table_k, table_v = tables_k[strip.tables, cols], tables_v[strip.tables, cols]
                x = _rectified_scores(plan, memory, strip, rows, tables_k, cols)
                ds = torch.bmm(grads, table_v.transpose(1, 2), out=memory.like("gradient", x))
                weight = x.square() if plan.power == 2 else x
                if plan.dropout_p:
                    kept = _kept(plan, weight, strip, cols)
                    weight, ds = weight * kept, ds.mul_(kept)
                dv[strip.tables, cols] += torch.bmm(weight.transpose(1, 2), grads)
                if constant is not None:
                    ds += _flat(constant, strip)[..., None]
                if slope is not None:
                    ds += _flat(slope, strip)[..., None] * torch.where(x > 0, x, 1.0).log_()
                torch.ops.aten.threshold_backward.grad_input(ds, x, 0, grad_input=ds)
                if plan.power == 2:
                    ds.mul_(x).mul_(2)
                dk[strip.tables, cols] += torch.bmm(ds.transpose(1, 2), rows)
                _product(read, ds, table_k, add=cols.start > strip.low)
        d_gamma = d_threshold = None
        if ctx.needs_input_grad[4]:
            dot = (out.to(exact) * grad.to(exact)).sum(-1)
            if grad_sum is not None:
                dot += grad_sum * sums
            if grad_log is not None:
                dot += grad_log * (sums + logs)
            d_gamma = (-dot.sum((0, 2)) / gamma).to(gamma.dtype)
        if ctx.needs_input_grad[5]:
            # The threshold's column meets a one in every key, so its gradient is the sum of dS.
            shift = dq[..., width].view(q.shape[:3]).sum((0, 2), dtype=exact)
            d_threshold = (-shift / plan.scale).to(threshold.dtype)
        dq = dq[..., :width].reshape(q.shape)
        return None, dq, _like(dk[..., :width], k), _like(dv, v), d_gamma, d_threshold


class _Memory:
    """Scratch that every tile uses again."""

    def __init__(self) -> None:
        self.held: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, int, int], like: Tensor) -> Tensor:
        """An uninitialised tensor."""
        size = shape[0] * shape[1] * shape[2]
        held = self.held.get(name)
        if held is None or held.numel() < size:
            held = self.held[name] = like.new_empty(size)
        return held[:size].view(shape)

    def like(self, name: str, other: Tensor) -> Tensor:
        """An uninitialised tensor of three dimensions, as the other."""
        return self.take(name, (other.shape[0], other.shape[1], other.shape[2]), other)


def _sum_dtype(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def _grouped(tensor: Tensor, groups: int) -> Tensor:
    """[B, H, Tq, ...] as [B * Hkv, G, Tq, ...]."""
    batch, heads = tensor.shape[:2]
    return tensor.reshape(batch * heads // groups, groups, *tensor.shape[2:])


def _flat(tensor: Tensor, strip: _Strip) -> Tensor:
    """A strip of [tables, G, Tq, ...] as [tables, rows, ...], a view: one head, or all rows."""
    part = tensor[strip.at]
    return part[:, 0] if part.shape[1] == 1 else part.flatten(1, 2)


def _like(tables: Tensor, other: Tensor) -> Tensor:
    """[B * Hkv, keys, width] in shape and type of the other, zeros for padding left out."""
    missing = other.shape[2] - tables.shape[1]
    if missing:
        tables = torch.nn.functional.pad(tables, (0, 0, 0, missing))
    return tables.to(other.dtype).reshape(other.shape)


def _tables(
    plan: _Plan, q: Tensor, k: Tensor, v: Tensor, threshold: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B * Hkv, G, Tq, D'], k and v [B * Hkv, Tk', .]: columns for the threshold, padding cut."""
    if threshold is not None or plan.threshold:
        q, k = _with_threshold(plan, q, k, threshold)
    lengths = plan.key_lengths
    if lengths is not None:
        longest = max(0, min(int(lengths.max()), k.shape[2])) if len(lengths) else 0
        hidden = torch.arange(longest) >= lengths[:, None]
        k, v = (each[:, :, :longest].masked_fill(hidden[:, None, :, None], 0) for each in (k, v))
    if q.shape[2] >= MANY_ROWS:
        # Products of strided tables are slower than these copies.
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    return _grouped(q, q.shape[1] // k.shape[1]), k.flatten(0, 1), v.flatten(0, 1)


def _with_threshold(
    plan: _Plan, q: Tensor, k: Tensor, threshold: Tensor | None
) -> tuple[Tensor, Tensor]:
    """q and k with columns whose product is -threshold / scale.

    The product subtracts it before it rounds, so that in bfloat16 too the sign, which gates the
    gradient, is that of the exact difference. Three parts hold a float32 in bfloat16.
    """
    exact = _sum_dtype(q)
    rest = torch.full((q.shape[1],), -plan.threshold / plan.scale, dtype=exact)
    if threshold is not None:
        rest = rest - threshold.detach().to(exact) / plan.scale
    parts = []
    for _ in range(3 if q.dtype == torch.bfloat16 else 1):
        parts.append(rest.to(q.dtype))
        rest = rest - parts[-1].to(exact)
    columns = torch.stack(parts, -1)[:, None].expand(*q.shape[:-1], len(parts))
    ones = torch.ones((*k.shape[:-1], len(parts)), dtype=k.dtype)
    return torch.cat([q, columns], -1), torch.cat([k, ones], -1)


def _strips(plan: _Plan, q: Tensor, k: Tensor, scores: int) -> Iterator[_Strip]:
    """Strips of q [tables, G, Tq, D] against k [tables, Tk', D]; they cover every row once.

    `scores` is the size of a tile for one thread.
    """
    count, groups, n_q, _ = q.shape
    n_k, offset = k.shape[1], plan.offset
    height = min(ROWS[q.dtype], max(n_q, 1))
    members = max(1, min(groups, ROWS[q.dtype] // height))
    width = max(1, scores // (height * members))
    room = scores * torch.get_num_threads()
    together = max(1, room // (height * members * max(1, min(width, n_k))))
    for table in range(0, count, together):
        tables = slice(table, min(table + together, count))
        for head in range(0, groups, members):
            heads = slice(head, min(head + members, groups))
            for row in range(0, n_q, height):
                stop = min(row + height, n_q)
                low, high = 0, n_k
                if plan.causal:
                    high = min(high, stop + offset)
                if plan.window is not None:
                    low = max(0, row + offset - plan.window + 1)
                    high = min(high, stop - 1 + offset + plan.window)
                yield _Strip(tables, heads, slice(row, stop), low, high, width)


def _rectified_scores(
    plan: _Plan, memory: _Memory, strip: _Strip, rows: Tensor, k: Tensor, cols: slice
) -> Tensor:
    """x [tables, rows, cols], zero where hidden."""
    width = cols.stop - cols.start
    x = memory.take("scores", (rows.shape[0], rows.shape[1], width), rows)
    table = k[strip.tables, cols]
    if rows.shape[1] == 1 and x.dtype == torch.bfloat16:
        # One row times a transposed table of bfloat16 can take forty times as long as this.
        torch.bmm(table, rows.transpose(1, 2), out=x.transpose(1, 2))
    else:
        torch.bmm(rows, table.transpose(1, 2), out=x)
    height = strip.rows.stop - strip.rows.start
    by_head = x.view(rows.shape[0], -1, height, width)
    # Row i of the tile stands at its column i + diagonal.
    diagonal = strip.rows.start + plan.offset - cols.start
    last = diagonal if plan.causal else width
    if plan.window is not None:
        last = min(last, diagonal + plan.window - 1)
        if diagonal - plan.window + 1 > 1 - height:
            by_head.triu_(diagonal - plan.window + 1)
    if last < width - 1:
        by_head.tril_(last)
    if x.dtype == torch.bfloat16:
        # As integers, numbers below zero are below zero too, and integers are much faster.
        x.view(torch.int16).clamp_min_(0)
        return x
    return x.relu_()


def _product(read: Tensor, weight: Tensor, table: Tensor, *, add: bool) -> None:
    """read = weight times table, or plus that."""
    if add:
        read.baddbmm_(weight, table)
    else:
        torch.bmm(weight, table, out=read)


def _factor(plan: _Plan, q: Tensor, gamma: Tensor | None) -> Tensor | float:
    """C_i, broadcastable to [B, H, Tq], zero for a row that sees nothing."""
    rules = Visibility(None, plan.causal, plan.key_lengths, plan.window)
    counts = rules.count(q.shape[2], plan.keys, q.device)
    unit = plan.scale**plan.power / plan.gamma
    factor: Tensor | float
    if isinstance(counts, int):
        factor = unit / (counts / 2) ** plan.length_exponent if counts else 0.0
    else:
        length = (counts.clamp(min=1).to(_sum_dtype(q)) / 2) ** plan.length_exponent
        factor = torch.where(counts > 0, unit / length, 0.0)
    if gamma is not None:
        factor = factor / gamma.detach().to(_sum_dtype(q))[:, None]
    return factor


def _column(factor: Tensor | float) -> Tensor | float:
    """[..., 1] of a tensor."""
    return factor if isinstance(factor, float) else factor[..., None]


def _log(factor: Tensor | float) -> Tensor | float:
    """The logarithm, 0 for a row that sees nothing."""
    if isinstance(factor, float):
        return math.log(factor) if factor > 0 else 0.0
    return torch.where(factor > 0, factor, 1.0).log()


def _row_terms(
    plan: _Plan, factor: Tensor | float, grad_sum: Tensor | None, grad_log: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """What the statistics add to dL/dx before its slope: a constant, and a multiple of log x."""
    constant = None if grad_sum is None else grad_sum * factor
    if grad_log is None:
        return constant, None
    more = grad_log * factor * (1 + _log(factor))
    return more if constant is None else constant + more, grad_log * factor * plan.power


def _kept(plan: _Plan, weight: Tensor, strip: _Strip, cols: slice) -> Tensor:
    """0 or 1 / (1 - p), the same for a tile in the forward and in the backward pass."""
    number = hash((strip.tables.start, strip.heads.start, strip.rows.start, cols.start)) % (1 << 40)
    generator = torch.Generator().manual_seed(plan.seed + number)
    kept = torch.empty_like(weight).bernoulli_(1 - plan.dropout_p, generator=generator)
    return kept.div_(1 - plan.dropout_p)
