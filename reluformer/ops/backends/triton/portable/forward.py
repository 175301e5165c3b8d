"""Forward kernel of rectified attention.

With x = max(q.k - t, 0), where t is the threshold in units of q.k, a weight is w = C_i x^p. The row
factor C_i contains scale, gamma and the number of visible keys. It multiplies the accumulator once
per row, after the loop over the keys (`SCALE_SCORES`: x is in units of the score instead). Row
statistics come from sums of x^p and x^p log2 x^p. With `ROW_NORMALISE`, the output of a row is
divided by its sum of weights plus epsilon; the statistics describe the weights before that.
"""

import triton
import triton.language as tl

from reluformer.ops.backends.triton.portable.arguments import LENGTH_DEPENDENT, Head, HeadMask
from reluformer.ops.backends.triton.portable.device import (
    LN2,
    dropout_factor,
    dropout_keys,
    entropy_wanted,
    folded,
    folded_pairs,
    head_threshold,
    keep_rows,
    key_range,
    load_sequence,
    load_tile,
    log2_positive,
    loop_bounds,
    raised,
    rectified,
    relu,
    row_factor,
    row_places,
    store_tile,
    visible,
    visible_count,
    widened,
)


@triton.jit
def _accumulate_keys(
    acc,
    total,
    log_total,
    seen_total,
    q_tile,
    k,
    v,
    mask,
    start,
    stop,
    rows,
    seq,
    head,
    window,
    strides,
    numbers,
    MASKED: tl.constexpr,
    LAST: tl.constexpr,
    CHECK: tl.constexpr,
    STATISTICS: tl.constexpr,
    SUMS: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Add the keys [start, stop) to the accumulators of a query tile."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    # Sum packed bf16 pairs, except with dropout, where undropped weights are summed.
    PAIRS: tl.constexpr = CONFIG.PTX and q_tile.dtype == tl.bfloat16 and not CONFIG.DROPOUT
    limit = seq.first_k + seq.end
    if CONFIG.DROPOUT:
        random = dropout_keys(head.seed, rows, head.bh)[:, None]  # [BLOCK_M, 1]
    # The loop over the last, partial tile is not pipelined: its pipeline would slow the loop over
    # whole tiles (9 % at width 64).
    for col in tl.range(start, stop, BLOCK_N, num_stages=1 if LAST else None):
        k_tile = load_tile(
            k, seq.batch, head.kv_head, seq.first_k + col, strides.k, limit,
            BLOCK_N, CONFIG.D_PAD, CONFIG.D, CONFIG.TMA, CHECK,
        )  # fmt: skip  # [BLOCK_N, D_PAD]
        # [BLOCK_M, BLOCK_N]
        score = tl.dot(q_tile, tl.trans(k_tile), input_precision=CONFIG.PRECISION)
        if CONFIG.SCALE_SCORES:
            score = score * numbers.scale
        if CONFIG.HAS_THRESHOLD:
            score = score - head.scaled_threshold
        cols = col + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        if MASKED:
            position = rows + (seq.n_k - seq.n_q)
            seen = visible(
                position[:, None], rows[:, None], cols[None, :], seq.end, window, seq.n_q, mask,
                CONFIG,
            )  # fmt: skip  # [BLOCK_M, BLOCK_N]
            score = tl.where(seen, score, 0.0)
            if CONFIG.HAS_MASK:
                seen_total += tl.sum(seen.to(tl.int32), 1)
        v_tile = load_tile(
            v, seq.batch, head.kv_head, seq.first_k + col, strides.v, limit,
            BLOCK_N, CONFIG.DV_PAD, CONFIG.DV, CONFIG.TMA, CHECK,
        )  # fmt: skip  # [BLOCK_N, DV_PAD]
        if MASKED and (CONFIG.HAS_LENGTHS or CONFIG.PACKED) and CONFIG.TMA:
            # A descriptor also loads rows past the end of the sequence, which may hold NaN.
            v_tile = keep_rows(v_tile, col, seq.end, BLOCK_N)
        if CONFIG.DROPOUT or CONFIG.POWER > 1 or (STATISTICS >= 1 and not PAIRS):
            weight = raised(relu(score), CONFIG.POWER)  # [BLOCK_M, BLOCK_N]
            dropped = weight
            if CONFIG.DROPOUT:
                dropped *= dropout_factor(random, cols[None, :], numbers.dropout)
            packed = dropped.to(v_tile.dtype)
        else:
            packed = rectified(score, v_tile.dtype, CONFIG.PTX)
        acc = tl.dot(packed, v_tile, acc, input_precision=CONFIG.PRECISION)  # [BLOCK_M, DV_PAD]
        # The sums are computed while the asynchronous product runs.
        if STATISTICS >= 1:
            if PAIRS:
                total += folded_pairs(packed, BLOCK_M, BLOCK_N, SUMS)
            else:
                total += folded(weight, BLOCK_M, BLOCK_N, SUMS)
        if STATISTICS == 2:
            if PAIRS:
                weight = widened(packed)
            logs = weight * log2_positive(weight, CONFIG.PTX)
            log_total += folded(logs, BLOCK_M, BLOCK_N, SUMS)
    return acc, total, log_total, seen_total


@triton.jit(do_not_specialize=LENGTH_DEPENDENT)
def forward_kernel(
    q,
    k,
    v,
    out,
    row_sum,
    log_sum,
    count,
    optional,
    strides,
    mask_stride_b,
    mask_stride_h,
    mask_stride_q,
    row_stride_b,
    row_stride_h,
    row_stride_t,
    heads,
    q_length,
    k_length,
    window,
    numbers,
    CONFIG: tl.constexpr,
):
    """Output and row statistics of BLOCK_M queries of one head.

    A program owns one query tile and loops over the key tiles that it sees. The query tile
    [BLOCK_M, D] and the accumulators (output [BLOCK_M, DV], row sums [BLOCK_M, SUMS]) stay in
    registers; key and value tiles pass through shared memory.
    """
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    # The grid is (sequence, head, tile), tiles fastest.
    tiles = tl.cdiv(q_length, BLOCK_M)
    tile = tl.program_id(0) % tiles
    bh = tl.program_id(0) // tiles
    if CONFIG.CAUSAL:
        # The last rows see most keys: start them first.
        tile = tiles - 1 - tile
    b = bh // heads
    h = bh % heads
    seq = load_sequence(b, optional, q_length, k_length, CONFIG)
    row = tile * BLOCK_M
    if CONFIG.PACKED:  # noqa: SIM102 (the outer test is compiled away)
        if row >= seq.n_q:
            return
    rows = row + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    offset = seq.n_k - seq.n_q
    TAIL: tl.constexpr = CONFIG.HAS_LENGTHS or CONFIG.PACKED or CONFIG.HAS_THRESHOLD
    EDGES: tl.constexpr = CONFIG.CAUSAL or CONFIG.WINDOW
    SINGLE: tl.constexpr = CONFIG.HAS_MASK or CONFIG.ONE_LOOP
    low, inner_low, inner_high, high = key_range(
        row, tl.minimum(row + BLOCK_M, seq.n_q), offset, seq.end, window, BLOCK_N, TAIL, CONFIG
    )
    q_tile = load_tile(
        q, seq.batch, h, seq.first_q + row, strides.q, seq.first_q + seq.n_q,
        BLOCK_M, CONFIG.D_PAD, CONFIG.D, CONFIG.TMA, True,
    )  # fmt: skip  # [BLOCK_M, D_PAD]
    inverse_scale = 1.0 if CONFIG.SCALE_SCORES else 1.0 / numbers.scale
    scaled_threshold = head_threshold(optional.threshold, numbers, inverse_scale, h, CONFIG)
    seed = tl.load(optional.seed) if CONFIG.DROPOUT else 0
    head_mask = optional.mask
    if CONFIG.HAS_MASK:
        head_mask = optional.mask + b.to(tl.int64) * mask_stride_b + h.to(tl.int64) * mask_stride_h
    mask = HeadMask(head_mask, mask_stride_q, strides.mask_key)
    head = Head(b, h, h // CONFIG.GROUP, bh, scaled_threshold, seed)
    wanted = entropy_wanted(row, h, b, CONFIG)
    DV_PAD: tl.constexpr = CONFIG.DV_PAD
    acc = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    # Few columns per row sum: they take few registers, and little is left to add at the end.
    SUMS: tl.constexpr = BLOCK_N // 8 if BLOCK_N > 64 else 8
    total = tl.zeros([BLOCK_M, SUMS], tl.float32)
    log_total = tl.zeros([BLOCK_M, SUMS], tl.float32)
    seen_total = tl.zeros([BLOCK_M], tl.int32)

    # Masked tiles, then whole tiles, then masked tiles. Loops that a configuration never needs are
    # not compiled.
    for part in tl.static_range(3):
        if (
            part == 1
            or (part == 0 and CONFIG.WINDOW and not SINGLE)
            or (part == 2 and (EDGES or TAIL) and not SINGLE)
        ):
            start, stop = loop_bounds(low, inner_low, inner_high, high, part, SINGLE)
            # Two versions of the loop, with and without logarithms; a program runs one of them.
            for level in tl.static_range(3):
                if (level == CONFIG.STATISTICS or (level == 1 and CONFIG.ENTROPY_EVERY > 1)) and (
                    CONFIG.ENTROPY_EVERY == 1 or wanted == (level == 2)
                ):
                    acc, total, log_total, seen_total = _accumulate_keys(
                        acc, total, log_total, seen_total, q_tile, k, v, mask, start, stop, rows,
                        seq, head, window, strides, numbers,
                        part != 1 or SINGLE, part == 2 and not EDGES,
                        part != 1 or SINGLE or not (CONFIG.CAUSAL or TAIL), level, SUMS, CONFIG,
                    )  # fmt: skip

    if CONFIG.HAS_MASK:
        n = seen_total.to(tl.float32)
    else:
        n = visible_count(rows + offset, seq.end, window, CONFIG)
    factor = row_factor(n, optional.gamma, h, numbers, CONFIG)  # [BLOCK_M]
    row_scale = factor
    if CONFIG.ROW_NORMALISE:
        sums = tl.sum(total, 1)
        row_scale = factor / (factor * sums + numbers.epsilon)
    store_tile(
        out, (acc * row_scale[:, None]).to(q_tile.dtype), seq.batch, h, seq.first_q + row,
        strides.out, seq.first_q + seq.n_q, BLOCK_M, CONFIG.DV_PAD, CONFIG.DV,
        CONFIG.TMA and not CONFIG.PACKED,
    )  # fmt: skip
    places = row_places(seq.batch, h, seq.first_q + rows, row_stride_b, row_stride_h, row_stride_t)
    if CONFIG.HAS_MASK:
        tl.store(count + places, n, mask=rows < seq.n_q)
    if CONFIG.STATISTICS >= 1:
        if not CONFIG.ROW_NORMALISE:
            # After the store of the output, which then overlaps with the sum.
            sums = tl.sum(total, 1)
        tl.store(row_sum + places, factor * sums, mask=rows < seq.n_q)
    if CONFIG.STATISTICS == 2:
        # sum w log w with w = factor * x^p, from the sums of x^p and x^p log2 x^p.
        log_factor = tl.log2(tl.where(factor > 0, factor, 1.0))
        logs = LN2 * factor * (log_factor * sums + tl.sum(log_total, 1))
        if CONFIG.ENTROPY_EVERY > 1:
            logs = tl.where(wanted, logs, 0.0)
        tl.store(log_sum + places, logs, mask=rows < seq.n_q)
