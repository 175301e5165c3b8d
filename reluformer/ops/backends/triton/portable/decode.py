"""Decoding kernels: few query rows, many keys, split over the keys with plain sums.

One program owns the query rows that share a key/value head (the heads of its group, times tokens or
beams) and every `splits`-th unit of keys. Weights need no normaliser that depends on all keys, so
the partial sums of the splits only have to be added, which `combine_kernel` does in fixed order.
That holds for row sums too, by which a rule may divide (`DIVIDE`) once all are there. A unit is a
tile of contiguous keys, or a page where keys and values lie in pages.

What only a rectified weight allows: value rows whose weights are zero for all rows of the program
are never read, nor are pages whose largest possible score does not reach the threshold. Both leave
out terms that are exactly zero, in the same order of summation.
"""

import triton
import triton.language as tl

from reluformer.ops.backends.triton.portable.device import (
    LENGTH_DEPENDENT,
    folded,
    head_threshold,
    key_range,
    raised,
    rectified,
    row_factor,
    visible,
    visible_count,
)

# Besides lengths, what the host derives from them.
_RUNTIME = [*LENGTH_DEPENDENT, "batches", "kv_heads", "group", "splits", "room", "stride_pt"]


@triton.jit
def _page(
    table, b, col, cols, stride_pt, end, KEYS: tl.constexpr, PAGE: tl.constexpr
):  # fmt: skip
    """(first index, index of the token) of keys `cols`: batch and column, or page and slot."""
    if PAGE == 0:
        page = b.to(tl.int64)
        slot = cols
    else:
        row = table + b.to(tl.int64) * stride_pt
        if KEYS <= PAGE:
            page = tl.load(row + col // PAGE).to(tl.int64)
        else:
            page = tl.load(row + cols // PAGE, mask=cols < end, other=0).to(tl.int64)
        slot = cols % PAGE
    return page, slot


@triton.jit
def _load(
    src, page, slot, head, stride_b, stride_h, stride_t, wanted,
    COLS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Rows of one head, [rows, COLS]; zeros, and no access, where `wanted` is false."""
    cols = tl.arange(0, COLS)
    places = page * stride_b + head.to(tl.int64) * stride_h + slot.to(tl.int64) * stride_t
    pointers = src + places[:, None] + cols[None, :]
    if COLS == WIDTH:
        tile = tl.load(pointers, mask=wanted[:, None], other=0.0)
    else:
        tile = tl.load(pointers, mask=wanted[:, None] & (cols < WIDTH)[None, :], other=0.0)
    return tile


@triton.jit
def _live_pages(
    live, q_tile, cut, valid, key_min, key_max, table, b, kv_head, first, own, splits,
    stride_pt, stride_eb, stride_eh, scale, slack,
    AT_ONCE: tl.constexpr, D_PAD: tl.constexpr, D: tl.constexpr,
    PRESCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """List in `live` those of the pages first, first + splits, .. that a row may read; how many.

    No key of a page can score more than sum_d max(q_d min_d, q_d max_d), for all rows at once two
    products; `slack` times sum_d |q_d| max(|min_d|, |max_d|) covers the rounding of both sides. A
    page of NaN is listed.
    """
    count = first * 0
    up = tl.maximum(q_tile, 0.0).to(q_tile.dtype)
    down = tl.minimum(q_tile, 0.0).to(q_tile.dtype)
    size = tl.abs(q_tile)
    for start in tl.range(0, own, AT_ONCE):
        at = start + tl.arange(0, AT_ONCE)
        inside = at < own
        unit = first + at * splits
        page = tl.load(table + b.to(tl.int64) * stride_pt + unit, mask=inside, other=0)
        page = page.to(tl.int64)
        low = _load(key_min, page, page * 0, kv_head, stride_eb, stride_eh, 0, inside, D_PAD, D)
        high = _load(key_max, page, page * 0, kv_head, stride_eb, stride_eh, 0, inside, D_PAD, D)
        far = tl.maximum(tl.abs(low), tl.abs(high)).to(q_tile.dtype)
        top = tl.dot(up, tl.trans(high), input_precision=PRECISION)
        top = tl.dot(down, tl.trans(low), top, input_precision=PRECISION)
        top += slack * tl.dot(size, tl.trans(far), input_precision=PRECISION)
        if PRESCALE:
            top = top * scale
        shut = (top <= cut[:, None]) | (valid == 0)[:, None]
        alive = (tl.min(shut.to(tl.int32), 0) == 0) & inside
        ones = alive.to(tl.int32)
        tl.store(live + count + tl.cumsum(ones, 0) - ones, unit, mask=alive)
        count += tl.sum(ones, 0)
    # What some threads have written, all are about to read.
    tl.debug_barrier()
    return count


@triton.jit(do_not_specialize=_RUNTIME)
def decode_kernel(
    q,
    k,
    v,
    out,
    partial,
    partial_sum,
    partial_count,
    row_sum,
    count,
    gamma,
    threshold,
    lengths,
    mask,
    table,
    key_min,
    key_max,
    live,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_vb,
    stride_vh,
    stride_vt,
    stride_ob,
    stride_oh,
    stride_ot,
    stride_mb,
    stride_mh,
    stride_mq,
    stride_mk,
    stride_pt,
    stride_eb,
    stride_eh,
    batches,
    kv_heads,
    group,
    q_length,
    k_length,
    window,
    splits,
    room,
    scale,
    unit_factor,
    threshold_value,
    length_exponent,
    epsilon,
    slack,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    POWER: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_GAMMA: tl.constexpr,
    DIVIDE: tl.constexpr,
    HAS_THRESHOLD: tl.constexpr,
    THRESHOLD_TENSOR: tl.constexpr,
    PRESCALE: tl.constexpr,
    ROW_SUMS: tl.constexpr,
    SKIP_VALUES: tl.constexpr,
    SKIP_PAGES: tl.constexpr,
    PTX: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Output of the rows if there is one split, else this split's part of it.

    partial [splits, B, H, Tq, DV], partial_sum and partial_count [splits, B, H, Tq]; live
    [programs, room]. `DIVIDE` needs `ROW_SUMS`.
    """
    row_tiles = tl.cdiv(group * q_length, ROWS)
    program = tl.program_id(0)
    row_tile = program % row_tiles
    split = program // row_tiles % splits
    b = program // row_tiles // splits // kv_heads
    kv_head = program // row_tiles // splits % kv_heads
    end = k_length
    if HAS_LENGTHS:
        end = tl.minimum(tl.maximum(tl.load(lengths + b).to(tl.int32), 0), k_length)
    # In pages every sequence ends at its own length, and its queries stand there.
    offset = (end if PAGE else k_length) - q_length

    rows = row_tile * ROWS + tl.arange(0, ROWS)
    valid = rows < group * q_length
    # Surplus rows repeat the last one and see nothing.
    near = tl.minimum(rows, group * q_length - 1)
    head = kv_head * group + near // q_length
    token = near % q_length
    row = tl.where(valid, token, q_length)
    q_tile = _load(
        q, b.to(tl.int64), token, head, stride_qb, stride_qh, stride_qt, valid, D_PAD, D
    )  # fmt: skip
    inverse_scale = 1.0 if PRESCALE else 1.0 / scale
    cut = tl.zeros([ROWS], tl.float32)
    if HAS_THRESHOLD:
        cut += head_threshold(threshold, threshold_value, inverse_scale, head, THRESHOLD_TENSOR)
    mask_rows = mask
    if HAS_MASK:
        mask_rows = mask + b.to(tl.int64) * stride_mb + (head.to(tl.int64) * stride_mh)[:, None]

    UNIT: tl.constexpr = PAGE if PAGE > KEYS else KEYS
    TILES: tl.constexpr = UNIT // KEYS
    low, _, _, high = key_range(0, q_length, offset, end, window, UNIT, CAUSAL, WINDOW, True)
    first = low // UNIT + split
    own = tl.maximum(tl.cdiv(tl.cdiv(high, UNIT) - first, splits), 0)
    if SKIP_PAGES:
        live += program.to(tl.int64) * room
        own = _live_pages(
            live, q_tile, cut, valid, key_min, key_max, table, b, kv_head, first, own, splits,
            stride_pt, stride_eb, stride_eh, scale, slack, 32, D_PAD, D, PRESCALE, PRECISION,
        )  # fmt: skip
    acc = tl.zeros([ROWS, DV_PAD], tl.float32)
    total = tl.zeros([ROWS, KEYS // 4 if ROW_SUMS else 1], tl.float32)
    seen_total = tl.zeros([ROWS], tl.int32)
    for at in tl.range(0, own * TILES):
        unit = tl.load(live + at // TILES) if SKIP_PAGES else first + at // TILES * splits
        col = unit * UNIT + at % TILES * KEYS
        cols = col + tl.arange(0, KEYS)
        page, slot = _page(table, b, col, cols, stride_pt, end, KEYS, PAGE)
        k_tile = _load(k, page, slot, kv_head, stride_kb, stride_kh, stride_kt, cols < end,
                       D_PAD, D)  # fmt: skip
        score = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        if PRESCALE:
            score = score * scale
        if HAS_THRESHOLD:
            score = score - cut[:, None]
        seen = visible(
            (row + offset)[:, None], row[:, None], cols[None, :], end, window,
            mask_rows, stride_mq, stride_mk, q_length, CAUSAL, WINDOW, HAS_MASK,
        )  # fmt: skip
        score = tl.where(seen, score, 0.0)
        if HAS_MASK:
            seen_total += tl.sum(seen.to(tl.int32), 1)
        exact = raised(tl.maximum(score, 0.0), POWER)
        weight = exact.to(v.dtype.element_ty)
        if POWER == 1:
            weight = rectified(score, v.dtype.element_ty, PTX)
        if ROW_SUMS:
            # Of weights that are not rounded; what is skipped below would add zeros.
            total += folded(exact, ROWS, KEYS, KEYS // 4)
        if SKIP_VALUES:
            # Not "> 0": a weight that is no number must stay visible.
            read = tl.max((weight != 0.0).to(tl.int32), 0)
            if tl.max(read, 0) > 0:
                v_tile = _load(v, page, slot, kv_head, stride_vb, stride_vh, stride_vt, read > 0,
                               DV_PAD, DV)  # fmt: skip
                acc = tl.dot(weight, v_tile, acc, input_precision=PRECISION)
        else:
            v_tile = _load(v, page, slot, kv_head, stride_vb, stride_vh, stride_vt, cols < end,
                           DV_PAD, DV)  # fmt: skip
            acc = tl.dot(weight, v_tile, acc, input_precision=PRECISION)

    sums = tl.sum(total, 1)
    wide = tl.arange(0, DV_PAD)
    inside = valid[:, None] & (wide < DV)[None, :]
    index = (b.to(tl.int64) * kv_heads * group + head) * q_length + token
    if splits > 1:
        index += split.to(tl.int64) * batches * kv_heads * group * q_length
        tl.store(partial + index[:, None] * DV + wide[None, :], acc, mask=inside)
        if ROW_SUMS:
            tl.store(partial_sum + index, sums, mask=valid)
        if HAS_MASK:
            tl.store(partial_count + index, seen_total.to(tl.float32), mask=valid)
    else:
        if HAS_MASK:
            n = seen_total.to(tl.float32)
            tl.store(count + index, n, mask=valid)
        else:
            n = visible_count(token + offset, end, window, CAUSAL, WINDOW)
        factor = row_factor(n, unit_factor, gamma, head, length_exponent, HAS_GAMMA)
        row_scale = factor
        if DIVIDE:
            row_scale = factor / (sums * factor + epsilon)
        places = b.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh + token * stride_ot
        tl.store(
            out + places[:, None] + wide[None, :],
            (acc * row_scale[:, None]).to(q_tile.dtype),
            mask=inside,
        )
        if ROW_SUMS:
            tl.store(row_sum + index, sums * factor, mask=valid)


@triton.jit(do_not_specialize=_RUNTIME)
def combine_kernel(
    partial,
    partial_sum,
    partial_count,
    out,
    row_sum,
    count,
    gamma,
    lengths,
    stride_ob,
    stride_oh,
    stride_ot,
    batches,
    heads,
    q_length,
    k_length,
    window,
    splits,
    unit_factor,
    length_exponent,
    epsilon,
    AT_ONCE: tl.constexpr,
    PAGED: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_GAMMA: tl.constexpr,
    DIVIDE: tl.constexpr,
    ROW_SUMS: tl.constexpr,
):
    """One output row: the sum of its parts, always in the same order, times its factor."""
    index = tl.program_id(0)
    token = index % q_length
    h = index // q_length % heads
    b = index // q_length // heads
    wide = tl.arange(0, DV_PAD)
    step = batches.to(tl.int64) * heads * q_length
    acc = tl.zeros([DV_PAD], tl.float32)
    n = tl.zeros([1], tl.float32)
    total = tl.zeros([1], tl.float32)
    for start in tl.range(0, splits, AT_ONCE):
        part = start + tl.arange(0, AT_ONCE)
        row = part * step + index
        parts = tl.load(
            partial + row[:, None] * DV + wide[None, :],
            mask=(part < splits)[:, None] & (wide < DV)[None, :],
            other=0.0,
        )
        acc += tl.sum(parts, 0)
        if ROW_SUMS:
            total += tl.sum(tl.load(partial_sum + row, mask=part < splits, other=0.0), 0)
        if HAS_MASK:
            n += tl.sum(tl.load(partial_count + row, mask=part < splits, other=0.0), 0)
    one = tl.arange(0, 1)
    if HAS_MASK:
        tl.store(count + index + one, n)
    else:
        end = k_length
        if HAS_LENGTHS:
            end = tl.minimum(tl.maximum(tl.load(lengths + b).to(tl.int32), 0), k_length)
        position = token + (end if PAGED else k_length) - q_length + one
        n = visible_count(position, end, window, CAUSAL, WINDOW)
    factor = row_factor(n, unit_factor, gamma, h, length_exponent, HAS_GAMMA)
    row_scale = factor
    if DIVIDE:
        row_scale = factor / (total * factor + epsilon)
    places = b.to(tl.int64) * stride_ob + h.to(tl.int64) * stride_oh + token * stride_ot
    tl.store(out + places + wide, (acc * row_scale).to(out.dtype.element_ty), mask=wide < DV)
    if ROW_SUMS:
        tl.store(row_sum + index + one, total * factor)
