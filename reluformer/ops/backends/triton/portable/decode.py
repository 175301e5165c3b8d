"""Decoding kernels: few query rows and many keys, split over the keys.

Rectified weights need no normaliser that depends on all keys, so the partial results of the splits
are added (`combine_kernel`, in a fixed order). The same holds for the row sums of a row
normalisation, which is applied after the sum.

Value rows whose weights are zero for all rows of a program are not loaded (`SKIP_VALUES`). That
leaves out terms that are exactly zero and does not change the order of summation.
"""

import triton
import triton.language as tl

from reluformer.ops.backends.triton.portable.arguments import LENGTH_DEPENDENT, HeadMask
from reluformer.ops.backends.triton.portable.device import (
    folded,
    head_threshold,
    key_range,
    raised,
    rectified,
    relu,
    row_factor,
    valid_keys,
    visible,
    visible_count,
)

# Arguments that change with the lengths, and values that the host derives from them.
_RUNTIME = [*LENGTH_DEPENDENT, "batches", "kv_heads", "group", "splits", "table_stride"]


@triton.jit
def _key_places(table, b, col, cols, table_stride, end, CONFIG: tl.constexpr):
    """(batch, column) of keys `cols`, or (page, slot) where keys are stored in pages."""
    if CONFIG.PAGE == 0:
        page = b.to(tl.int64)
        slot = cols
    else:
        row = table + b.to(tl.int64) * table_stride
        if CONFIG.BLOCK_N <= CONFIG.PAGE:
            page = tl.load(row + col // CONFIG.PAGE).to(tl.int64)
        else:
            page = tl.load(row + cols // CONFIG.PAGE, mask=cols < end, other=0).to(tl.int64)
        slot = cols % CONFIG.PAGE
    return page, slot


@triton.jit
def _load_rows(
    src, page, slot, head, strides, wanted, COLS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Rows of one head, [rows, COLS]; rows that are not `wanted` are zero and not read."""
    cols = tl.arange(0, COLS)
    places = page * strides[0] + head.to(tl.int64) * strides[1] + slot.to(tl.int64) * strides[2]
    pointers = src + places[:, None] + cols[None, :]  # [rows, COLS]
    if COLS == WIDTH:
        tile = tl.load(pointers, mask=wanted[:, None], other=0.0)
    else:
        tile = tl.load(pointers, mask=wanted[:, None] & (cols < WIDTH)[None, :], other=0.0)
    return tile


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
    strides,
    mask_stride_b,
    mask_stride_h,
    mask_stride_q,
    table_stride,
    batches,
    kv_heads,
    group,
    q_length,
    k_length,
    window,
    splits,
    numbers,
    CONFIG: tl.constexpr,
):
    """Output of BLOCK_M query rows that share a key head, or one split's part of it.

    A program owns the rows (query heads of a group x tokens) and every `splits`-th unit of keys. A
    unit is a key tile, or a page where keys and values are stored in pages. The query tile
    [BLOCK_M, D] and the accumulator [BLOCK_M, DV] are in registers; key tiles [BLOCK_N, D] pass
    through shared memory. With one split the program writes the output. With more, it writes
    partial [splits, B, H, Tq, DV], partial_sum and partial_count [splits, B, H, Tq].
    """
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    ROW_SUMS: tl.constexpr = CONFIG.STATISTICS >= 1
    # The grid is (sequence, key head, split, row tile), row tiles fastest.
    row_tiles = tl.cdiv(group * q_length, BLOCK_M)
    program = tl.program_id(0)
    row_tile = program % row_tiles
    split = program // row_tiles % splits
    b = program // row_tiles // splits // kv_heads
    kv_head = program // row_tiles // splits % kv_heads
    end = k_length
    if CONFIG.HAS_LENGTHS:
        end = valid_keys(lengths, b, k_length)
    # In pages, the queries of a sequence are aligned with its own length.
    offset = (end if CONFIG.PAGE else k_length) - q_length

    rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    valid = rows < group * q_length
    # Surplus rows repeat the last row and see no key.
    near = tl.minimum(rows, group * q_length - 1)
    # Row r of the tile is token r % Tq of query head r // Tq of the group.
    head = kv_head * group + near // q_length
    token = near % q_length
    row = tl.where(valid, token, q_length)
    q_tile = _load_rows(
        q, b.to(tl.int64), token, head, strides.q, valid, CONFIG.D_PAD, CONFIG.D
    )  # fmt: skip  # [BLOCK_M, D_PAD]
    inverse_scale = 1.0 if CONFIG.SCALE_SCORES else 1.0 / numbers.scale
    scaled_threshold = tl.zeros([BLOCK_M], tl.float32)
    if CONFIG.HAS_THRESHOLD:
        scaled_threshold += head_threshold(threshold, numbers, inverse_scale, head, CONFIG)
    mask_rows = mask
    if CONFIG.HAS_MASK:
        mask_rows = (
            mask + b.to(tl.int64) * mask_stride_b + (head.to(tl.int64) * mask_stride_h)[:, None]
        )
    row_mask = HeadMask(mask_rows, mask_stride_q, strides.mask_key)

    UNIT: tl.constexpr = CONFIG.PAGE if CONFIG.PAGE > BLOCK_N else BLOCK_N
    TILES: tl.constexpr = UNIT // BLOCK_N
    # Units of this split: first, first + splits, ...
    low, _, _, high = key_range(0, q_length, offset, end, window, UNIT, True, CONFIG)
    first = low // UNIT + split
    units = tl.maximum(tl.cdiv(tl.cdiv(high, UNIT) - first, splits), 0)
    DV_PAD: tl.constexpr = CONFIG.DV_PAD
    acc = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_N // 4 if ROW_SUMS else 1], tl.float32)
    seen_total = tl.zeros([BLOCK_M], tl.int32)
    for step in tl.range(0, units * TILES):
        col = (first + step // TILES * splits) * UNIT + step % TILES * BLOCK_N
        cols = col + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        page, slot = _key_places(table, b, col, cols, table_stride, end, CONFIG)
        k_tile = _load_rows(
            k, page, slot, kv_head, strides.k, cols < end, CONFIG.D_PAD, CONFIG.D
        )  # fmt: skip  # [BLOCK_N, D_PAD]
        # [BLOCK_M, BLOCK_N]
        score = tl.dot(q_tile, tl.trans(k_tile), input_precision=CONFIG.PRECISION)
        if CONFIG.SCALE_SCORES:
            score = score * numbers.scale
        if CONFIG.HAS_THRESHOLD:
            score = score - scaled_threshold[:, None]
        seen = visible(
            (row + offset)[:, None], row[:, None], cols[None, :], end, window, q_length, row_mask,
            CONFIG,
        )  # fmt: skip  # [BLOCK_M, BLOCK_N]
        score = tl.where(seen, score, 0.0)
        if CONFIG.HAS_MASK:
            seen_total += tl.sum(seen.to(tl.int32), 1)
        exact = raised(relu(score), CONFIG.POWER)
        weight = exact.to(v.dtype.element_ty)
        if CONFIG.POWER == 1:
            weight = rectified(score, v.dtype.element_ty, CONFIG.PTX)
        if ROW_SUMS:
            # Sums of unrounded weights; value rows skipped below have weight zero.
            total += folded(exact, BLOCK_M, BLOCK_N, BLOCK_N // 4)
        if CONFIG.SKIP_VALUES:
            # Not "> 0": a NaN weight must reach the output.
            needed = tl.max((weight != 0.0).to(tl.int32), 0)  # [BLOCK_N]
            if tl.max(needed, 0) > 0:
                v_tile = _load_rows(
                    v, page, slot, kv_head, strides.v, needed > 0, CONFIG.DV_PAD, CONFIG.DV
                )  # fmt: skip  # [BLOCK_N, DV_PAD]
                acc = tl.dot(weight, v_tile, acc, input_precision=CONFIG.PRECISION)
        else:
            v_tile = _load_rows(
                v, page, slot, kv_head, strides.v, cols < end, CONFIG.DV_PAD, CONFIG.DV
            )  # fmt: skip  # [BLOCK_N, DV_PAD]
            acc = tl.dot(weight, v_tile, acc, input_precision=CONFIG.PRECISION)

    sums = tl.sum(total, 1)  # [BLOCK_M]
    wide = tl.arange(0, CONFIG.DV_PAD)
    inside = valid[:, None] & (wide < CONFIG.DV)[None, :]
    index = (b.to(tl.int64) * kv_heads * group + head) * q_length + token
    if splits > 1:
        index += split.to(tl.int64) * batches * kv_heads * group * q_length
        tl.store(partial + index[:, None] * CONFIG.DV + wide[None, :], acc, mask=inside)
        if ROW_SUMS:
            tl.store(partial_sum + index, sums, mask=valid)
        if CONFIG.HAS_MASK:
            tl.store(partial_count + index, seen_total.to(tl.float32), mask=valid)
    else:
        if CONFIG.HAS_MASK:
            n = seen_total.to(tl.float32)
            tl.store(count + index, n, mask=valid)
        else:
            n = visible_count(token + offset, end, window, CONFIG)
        factor = row_factor(n, gamma, head, numbers, CONFIG)
        row_scale = factor
        if CONFIG.ROW_NORMALISE:
            row_scale = factor / (sums * factor + numbers.epsilon)
        places = b.to(tl.int64) * strides.out[0] + head.to(tl.int64) * strides.out[1]
        places = places + token * strides.out[2]
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
    out_strides,
    batches,
    heads,
    q_length,
    k_length,
    window,
    splits,
    numbers,
    AT_ONCE: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """One output row [DV]: the sum of its partial results in a fixed order, times its factor.

    A program owns one row and loops over the splits, `AT_ONCE` at a time, all in registers.
    """
    ROW_SUMS: tl.constexpr = CONFIG.STATISTICS >= 1
    # The grid is (sequence, head, token), tokens fastest.
    index = tl.program_id(0)
    token = index % q_length
    h = index // q_length % heads
    b = index // q_length // heads
    wide = tl.arange(0, CONFIG.DV_PAD)
    step = batches.to(tl.int64) * heads * q_length
    DV_PAD: tl.constexpr = CONFIG.DV_PAD
    acc = tl.zeros([DV_PAD], tl.float32)
    n = tl.zeros([1], tl.float32)
    total = tl.zeros([1], tl.float32)
    for start in tl.range(0, splits, AT_ONCE):
        part = start + tl.arange(0, AT_ONCE)  # [AT_ONCE]
        row = part * step + index
        parts = tl.load(
            partial + row[:, None] * CONFIG.DV + wide[None, :],
            mask=(part < splits)[:, None] & (wide < CONFIG.DV)[None, :],
            other=0.0,
        )  # [AT_ONCE, DV_PAD]
        acc += tl.sum(parts, 0)
        if ROW_SUMS:
            total += tl.sum(tl.load(partial_sum + row, mask=part < splits, other=0.0), 0)
        if CONFIG.HAS_MASK:
            n += tl.sum(tl.load(partial_count + row, mask=part < splits, other=0.0), 0)
    one = tl.arange(0, 1)
    if CONFIG.HAS_MASK:
        tl.store(count + index + one, n)
    else:
        end = k_length
        if CONFIG.HAS_LENGTHS:
            end = valid_keys(lengths, b, k_length)
        position = token + (end if CONFIG.PAGE else k_length) - q_length + one
        n = visible_count(position, end, window, CONFIG)
    factor = row_factor(n, gamma, h, numbers, CONFIG)
    row_scale = factor
    if CONFIG.ROW_NORMALISE:
        row_scale = factor / (total * factor + numbers.epsilon)
    places = b.to(tl.int64) * out_strides[0] + h.to(tl.int64) * out_strides[1]
    places = places + token * out_strides[2]
    # [DV_PAD]
    tl.store(out + places + wide, (acc * row_scale).to(out.dtype.element_ty), mask=wide < CONFIG.DV)
    if ROW_SUMS:
        tl.store(row_sum + index + one, total * factor)
