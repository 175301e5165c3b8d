"""Forward kernel: one program owns a tile of queries of one head and walks over the keys.

The loop knows neither scale nor normaliser. With x = max(q.k - t, 0), t the threshold in units of
q.k, a weight is w = C_i x^p; C_i holds scale, gamma and the count of visible keys and multiplies
the accumulator once per row at the end. (`PRESCALE`: x is in units of the score instead.) Row
statistics come from sums of x^p and x^p log2 x^p. With `DIVIDE` that factor of a row is divided by
its sum of weights plus epsilon; statistics are of the weights before.
"""

import triton
import triton.language as tl

from reluformer.ops.backends.triton.portable.device import (
    LENGTH_DEPENDENT,
    LN2,
    dropout_factor,
    dropout_keys,
    entropy_wanted,
    folded,
    folded_pairs,
    head_threshold,
    keep_rows,
    key_range,
    load_tile,
    log2_positive,
    raised,
    rectified,
    row_factor,
    row_places,
    sequence,
    store_tile,
    visible,
    visible_count,
    widened,
)


@triton.jit
def _walk(
    acc,
    total,
    log_total,
    seen_total,
    q_tile,
    k,
    v,
    mask,
    low,
    high,
    rows,
    n_q,
    batch,
    kv_head,
    first_k,
    offset,
    end,
    window,
    cut,
    scale,
    seed_value,
    bh,
    dropout,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_vb,
    stride_vh,
    stride_vt,
    stride_mq,
    stride_mk,
    MASKED: tl.constexpr,
    LAST: tl.constexpr,
    CHECK: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    POWER: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_MASK: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_THRESHOLD: tl.constexpr,
    PRESCALE: tl.constexpr,
    STATISTICS: tl.constexpr,
    SUMS: tl.constexpr,
    DROPOUT: tl.constexpr,
    TMA: tl.constexpr,
    PTX: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # Of rounded weights, which lie in registers by twos; those of dropout are not what is summed.
    PAIRS: tl.constexpr = PTX and q_tile.dtype == tl.bfloat16 and not DROPOUT
    if DROPOUT:
        random = dropout_keys(seed_value, rows, bh)[:, None]
    # A loop for the last tile alone: a pipeline in it would slow the one before (9 % at width 64).
    for col in tl.range(low, high, KEYS, num_stages=1 if LAST else None):
        k_tile = load_tile(
            k, batch, kv_head, first_k + col, stride_kb, stride_kh, stride_kt, first_k + end,
            KEYS, D_PAD, D, TMA, CHECK,
        )  # fmt: skip
        score = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        if PRESCALE:
            score = score * scale
        if HAS_THRESHOLD:
            score = score - cut
        cols = col + tl.arange(0, KEYS)
        if MASKED:
            seen = visible(
                (rows + offset)[:, None], rows[:, None], cols[None, :], end, window,
                mask, stride_mq, stride_mk, n_q, CAUSAL, WINDOW, HAS_MASK,
            )  # fmt: skip
            score = tl.where(seen, score, 0.0)
            if HAS_MASK:
                seen_total += tl.sum(seen.to(tl.int32), 1)
        v_tile = load_tile(
            v, batch, kv_head, first_k + col, stride_vb, stride_vh, stride_vt, first_k + end,
            KEYS, DV_PAD, DV, TMA, CHECK,
        )  # fmt: skip
        if MASKED and PADDED and TMA:
            v_tile = keep_rows(v_tile, col, end, KEYS)
        if DROPOUT or POWER > 1 or (STATISTICS >= 1 and not PAIRS):
            weight = raised(tl.maximum(score, 0.0), POWER)
            dropped = weight
            if DROPOUT:
                dropped *= dropout_factor(random, cols[None, :], dropout)
            packed = dropped.to(v_tile.dtype)
        else:
            packed = rectified(score, v_tile.dtype, PTX)
        acc = tl.dot(packed, v_tile, acc, input_precision=PRECISION)
        # Sums are taken while the product is under way.
        if STATISTICS >= 1:
            if PAIRS:
                total += folded_pairs(packed, QUERIES, KEYS, SUMS)
            else:
                total += folded(weight, QUERIES, KEYS, SUMS)
        if STATISTICS == 2:
            if PAIRS:
                weight = widened(packed)
            log_total += folded(weight * log2_positive(weight, PTX), QUERIES, KEYS, SUMS)
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
    gamma,
    threshold,
    lengths,
    mask,
    cu_q,
    cu_k,
    seed,
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
    stride_sb,
    stride_sh,
    stride_st,
    heads,
    q_length,
    k_length,
    window,
    scale,
    unit,
    threshold_value,
    length_exponent,
    dropout,
    epsilon,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    POWER: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    VARLEN: tl.constexpr,
    HAS_GAMMA: tl.constexpr,
    DIVIDE: tl.constexpr,
    HAS_THRESHOLD: tl.constexpr,
    THRESHOLD_TENSOR: tl.constexpr,
    PRESCALE: tl.constexpr,
    STATISTICS: tl.constexpr,
    EVERY: tl.constexpr,
    DROPOUT: tl.constexpr,
    ONE_LOOP: tl.constexpr,
    TMA: tl.constexpr,
    PTX: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tiles = tl.cdiv(q_length, QUERIES)
    tile = tl.program_id(0) % tiles
    bh = tl.program_id(0) // tiles
    if CAUSAL:
        # The last rows see most keys: start them first.
        tile = tiles - 1 - tile
    b = bh // heads
    h = bh % heads
    batch, first_q, first_k, n_q, n_k, end = sequence(
        b, cu_q, cu_k, lengths, q_length, k_length, VARLEN, HAS_LENGTHS
    )
    row = tile * QUERIES
    if VARLEN:  # noqa: SIM102 (the outer test is compiled away)
        if row >= n_q:
            return
    rows = row + tl.arange(0, QUERIES)
    offset = n_k - n_q
    PADDED: tl.constexpr = HAS_LENGTHS or VARLEN
    TAIL: tl.constexpr = PADDED or HAS_THRESHOLD
    EDGES: tl.constexpr = CAUSAL or WINDOW
    SINGLE: tl.constexpr = HAS_MASK or ONE_LOOP
    low, inner_low, inner_high, high = key_range(
        row, tl.minimum(row + QUERIES, n_q), offset, end, window, KEYS, CAUSAL, WINDOW, TAIL
    )
    q_tile = load_tile(
        q, batch, h, first_q + row, stride_qb, stride_qh, stride_qt, first_q + n_q,
        QUERIES, D_PAD, D, TMA, True,
    )  # fmt: skip
    inverse_scale = 1.0 if PRESCALE else 1.0 / scale
    cut = head_threshold(threshold, threshold_value, inverse_scale, h, THRESHOLD_TENSOR)
    seed_value = tl.load(seed) if DROPOUT else 0
    mask_head = mask
    if HAS_MASK:
        mask_head = mask + b.to(tl.int64) * stride_mb + h.to(tl.int64) * stride_mh
    kv_head = h // GROUP
    wanted = entropy_wanted(row, h, b, EVERY)
    acc = tl.zeros([QUERIES, DV_PAD], tl.float32)
    # So few columns that sums of a row are nearly complete and take few registers.
    SUMS: tl.constexpr = KEYS // 8 if KEYS > 64 else 8
    total = tl.zeros([QUERIES, SUMS], tl.float32)
    log_total = tl.zeros([QUERIES, SUMS], tl.float32)
    seen_total = tl.zeros([QUERIES], tl.int32)

    # Masked tiles before, whole tiles between, masked tiles after; a loop that a case never needs
    # is not compiled.
    for part in tl.static_range(3):
        if (
            part == 1
            or (part == 0 and WINDOW and not SINGLE)
            or (part == 2 and (EDGES or TAIL) and not SINGLE)
        ):
            if SINGLE:
                start = low
                stop = high
            elif part == 0:
                start = low
                stop = tl.minimum(inner_low, high)
            elif part == 1:
                start = inner_low
                stop = inner_high
            else:
                start = inner_high
                stop = high
            # Loops with and without logarithms, of which a program runs one.
            for level in tl.static_range(3):
                if (level == STATISTICS or (level == 1 and EVERY > 1)) and (
                    EVERY == 1 or wanted == (level == 2)
                ):
                    acc, total, log_total, seen_total = _walk(
                        acc, total, log_total, seen_total, q_tile, k, v, mask_head, start, stop,
                        rows, n_q, batch, kv_head, first_k, offset, end, window,
                        cut, scale, seed_value, bh, dropout,
                        stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
                        stride_mq, stride_mk,
                        part != 1 or SINGLE, part == 2 and not EDGES,
                        part != 1 or SINGLE or not (CAUSAL or TAIL),
                        QUERIES, KEYS, D, DV, D_PAD, DV_PAD, POWER, CAUSAL, WINDOW, HAS_MASK,
                        PADDED, HAS_THRESHOLD, PRESCALE, level, SUMS, DROPOUT, TMA, PTX, PRECISION,
                    )  # fmt: skip

    if HAS_MASK:
        n = seen_total.to(tl.float32)
    else:
        n = visible_count(rows + offset, end, window, CAUSAL, WINDOW)
    factor = row_factor(n, unit, gamma, h, length_exponent, HAS_GAMMA)
    row_scale = factor
    if DIVIDE:
        sums = tl.sum(total, 1)
        row_scale = factor / (factor * sums + epsilon)
    store_tile(
        out, (acc * row_scale[:, None]).to(q_tile.dtype), batch, h, first_q + row,
        stride_ob, stride_oh, stride_ot, first_q + n_q, QUERIES, DV_PAD, DV, TMA and not VARLEN,
    )  # fmt: skip
    stats = row_places(batch, h, first_q + rows, stride_sb, stride_sh, stride_st)
    if HAS_MASK:
        tl.store(count + stats, n, mask=rows < n_q)
    if STATISTICS >= 1:
        if not DIVIDE:
            # Not before the output is on its way.
            sums = tl.sum(total, 1)
        tl.store(row_sum + stats, factor * sums, mask=rows < n_q)
    if STATISTICS == 2:
        log_factor = tl.log2(tl.where(factor > 0, factor, 1.0))
        logs = LN2 * factor * (log_factor * sums + tl.sum(log_total, 1))
        if EVERY > 1:
            logs = tl.where(wanted, logs, 0.0)
        tl.store(log_sum + stats, logs, mask=rows < n_q)
