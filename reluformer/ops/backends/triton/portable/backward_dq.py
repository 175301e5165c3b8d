"""Gradients of queries: the formulas are in `backward_keys.py`."""

import triton
import triton.language as tl

from reluformer.ops.backends.triton.portable.device import (
    LENGTH_DEPENDENT,
    dropout_factor,
    dropout_keys,
    entropy_wanted,
    head_threshold,
    keep_rows,
    key_range,
    load_tile,
    log2_positive,
    raised,
    rectified,
    row_places,
    sequence,
    store_tile,
    visible,
)
from reluformer.ops.backends.triton.portable.row_terms import row_terms
from reluformer.ops.backends.triton.portable.sign_bits import (
    PAIRS,
    gated,
    head_blocks,
    load_signs,
    positive,
    sign_bits,
    sign_gated,
    sign_quarters,
)


@triton.jit
def _walk_keys(
    acc,
    shift_total,
    q_tile,
    g_tile,
    constant,
    slope,
    k,
    v,
    mask,
    signs,
    low,
    high,
    row,
    rows,
    n_q,
    k_length,
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
    GRADS: tl.constexpr,
    DROPOUT: tl.constexpr,
    ROW_SHIFT: tl.constexpr,
    SIGNS: tl.constexpr,
    TMA: tl.constexpr,
    PTX: tl.constexpr,
    PRECISION: tl.constexpr,
):
    if DROPOUT:
        random = dropout_keys(seed_value, rows, bh)[:, None]
    if SIGNS:
        quarters = sign_quarters(signs, row, low, k_length, QUERIES, KEYS)
        words = load_signs(quarters, QUERIES, KEYS, PTX)
    for col in tl.range(low, high, KEYS, num_stages=1 if LAST else None):
        k_tile = load_tile(
            k, batch, kv_head, first_k + col, stride_kb, stride_kh, stride_kt, first_k + end,
            KEYS, D_PAD, D, TMA, CHECK,
        )  # fmt: skip
        v_tile = load_tile(
            v, batch, kv_head, first_k + col, stride_vb, stride_vh, stride_vt, first_k + end,
            KEYS, DV_PAD, DV, TMA, CHECK,
        )  # fmt: skip
        if MASKED and PADDED and TMA:
            k_tile = keep_rows(k_tile, col, end, KEYS)
        if not SIGNS:
            score = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        grad = tl.dot(g_tile, tl.trans(v_tile), input_precision=PRECISION)
        if not SIGNS:
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
            if not SIGNS:
                score = tl.where(seen, score, 0.0)
        if DROPOUT:
            grad *= dropout_factor(random, cols[None, :], dropout)
        if GRADS >= 1:
            grad += constant[:, None]
        if GRADS == 2:
            grad += slope[:, None] * log2_positive(score, PTX)
        if POWER > 1:
            x = tl.maximum(score, 0.0)
            grad *= raised(x, POWER - 1)
            if MASKED:
                # Gradients of what is not seen may be NaN.
                grad = tl.where(x > 0, grad, 0.0)
        if SIGNS and MASKED:
            # What no key has met has no signs.
            grad = tl.where(seen, grad, 0.0)
        if POWER == 1 and PTX and not ROW_SHIFT and k_tile.dtype == tl.bfloat16:
            if SIGNS:
                packed = sign_gated(grad, words, QUERIES, KEYS)
            else:
                packed = gated(grad, positive(rectified(score, tl.bfloat16, PTX)))
        else:
            if SIGNS:
                grad = tl.where(sign_bits(words, QUERIES, KEYS), grad, 0.0)
            elif POWER == 1:
                grad = tl.where(score > 0, grad, 0.0)
            if ROW_SHIFT:
                shift_total += tl.sum(grad, 1)
            packed = grad.to(k_tile.dtype)
        if SIGNS:
            # Those of the next tile, a tile ahead: memory is far.
            quarters += 2 * KEYS
            words = load_signs(quarters, QUERIES, KEYS, PTX)
        acc = tl.dot(packed, k_tile, acc, input_precision=PRECISION)
    return acc, shift_total


@triton.jit(do_not_specialize=LENGTH_DEPENDENT)
def queries_kernel(
    q,
    k,
    v,
    grad_out,
    dq,
    out,
    grad_sum,
    grad_log,
    count,
    row_sum,
    row_dot,
    row_shift,
    signs,
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
    stride_gb,
    stride_gh,
    stride_gt,
    stride_dqb,
    stride_dqh,
    stride_dqt,
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
    GRADS: tl.constexpr,
    EVERY: tl.constexpr,
    DROPOUT: tl.constexpr,
    ROW_DOT: tl.constexpr,
    ROW_SHIFT: tl.constexpr,
    SIGNS: tl.constexpr,
    ONE_LOOP: tl.constexpr,
    TMA: tl.constexpr,
    PTX: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dQ, and per row O.dO (for gamma) and the sum of dS in score units (for the threshold).

    With `DIVIDE` O.dO is there already, and read. With `SIGNS` so are the signs of the weights,
    and no scores are made: a gradient passes a ReLU or not.
    """
    tiles = tl.cdiv(q_length, QUERIES)
    tile = tl.program_id(0) % tiles
    bh = tl.program_id(0) // tiles
    if CAUSAL:
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
    g_tile = load_tile(
        grad_out, batch, h, first_q + row, stride_gb, stride_gh, stride_gt, first_q + n_q,
        QUERIES, DV_PAD, DV, TMA, True,
    )  # fmt: skip
    stats = row_places(batch, h, first_q + rows, stride_sb, stride_sh, stride_st)
    wanted = entropy_wanted(row, h, b, EVERY)
    factor, constant, slope = row_terms(
        stats, rows, n_q, rows + offset, end, window, count, grad_sum, grad_log, row_sum, row_dot,
        wanted, unit, gamma, h, length_exponent, epsilon,
        CAUSAL, WINDOW, HAS_MASK, HAS_GAMMA, DIVIDE, POWER, GRADS,
    )  # fmt: skip
    inverse_scale = 1.0 if PRESCALE else 1.0 / scale
    cut = head_threshold(threshold, threshold_value, inverse_scale, h, THRESHOLD_TENSOR)
    seed_value = tl.load(seed) if DROPOUT else 0
    mask_head = mask
    if HAS_MASK:
        mask_head = mask + b.to(tl.int64) * stride_mb + h.to(tl.int64) * stride_mh
    signs_head = signs
    if SIGNS:
        signs_head = signs + bh.to(tl.int64) * head_blocks(q_length, k_length) * PAIRS
    kv_head = h // GROUP
    acc = tl.zeros([QUERIES, D_PAD], tl.float32)
    shift_total = tl.zeros([QUERIES], tl.float32)

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
            # Loops with and without logarithms, of which a program runs one. With signs, none that
            # is empty: see `keys_kernel`.
            for level in tl.static_range(3):
                if (level == GRADS or (level == 1 and EVERY > 1)) and (
                    (not SIGNS or start < stop) and (EVERY == 1 or wanted == (level == 2))
                ):
                    acc, shift_total = _walk_keys(
                        acc, shift_total, q_tile, g_tile, constant, slope, k, v, mask_head,
                        signs_head, start, stop, row, rows, n_q, k_length, batch, kv_head,
                        first_k, offset, end, window, cut, scale, seed_value, bh, dropout,
                        stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
                        stride_mq, stride_mk,
                        part != 1 or SINGLE, part == 2 and not EDGES,
                        part != 1 or SINGLE or not (CAUSAL or TAIL),
                        QUERIES, KEYS, D, DV, D_PAD, DV_PAD, POWER, CAUSAL, WINDOW, HAS_MASK,
                        PADDED, HAS_THRESHOLD, PRESCALE, level, DROPOUT, ROW_SHIFT, SIGNS, TMA,
                        PTX, PRECISION,
                    )  # fmt: skip

    factor *= POWER
    if ROW_SHIFT:
        tl.store(row_shift + stats, shift_total * factor * inverse_scale, mask=rows < n_q)
    if ROW_DOT:
        o_tile = load_tile(
            out, batch, h, first_q + row, stride_ob, stride_oh, stride_ot, first_q + n_q,
            QUERIES, DV_PAD, DV, False, True,
        )  # fmt: skip
        dot = tl.sum(o_tile.to(tl.float32) * g_tile.to(tl.float32), 1)
        tl.store(row_dot + stats, dot, mask=rows < n_q)
    if PRESCALE:
        factor *= scale
    store_tile(
        dq, (acc * factor[:, None]).to(q_tile.dtype), batch, h, first_q + row,
        stride_dqb, stride_dqh, stride_dqt, first_q + n_q, QUERIES, D_PAD, D, TMA and not VARLEN,
    )  # fmt: skip
