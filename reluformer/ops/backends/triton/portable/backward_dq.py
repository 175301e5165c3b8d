"""Backward kernel for dQ; the formulas are in `backward_dkv.py`."""

import triton
import triton.language as tl

from reluformer.ops.backends.triton.portable.arguments import (
    LENGTH_DEPENDENT,
    Head,
    HeadMask,
    RowValues,
)
from reluformer.ops.backends.triton.portable.device import (
    dropout_factor,
    dropout_keys,
    entropy_wanted,
    head_threshold,
    keep_rows,
    key_range,
    load_sequence,
    load_tile,
    log2_positive,
    loop_bounds,
    raised,
    rectified,
    row_places,
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
def _accumulate_keys(
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
    start,
    stop,
    row,
    rows,
    seq,
    head,
    k_length,
    window,
    strides,
    numbers,
    MASKED: tl.constexpr,
    LAST: tl.constexpr,
    CHECK: tl.constexpr,
    SUM_GRADS: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Add the keys [start, stop) to dQ of a query tile and to its sums of dS."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    POWER: tl.constexpr = CONFIG.POWER
    SIGNS: tl.constexpr = CONFIG.SIGNS
    limit = seq.first_k + seq.end
    if CONFIG.DROPOUT:
        random = dropout_keys(head.seed, rows, head.bh)[:, None]  # [BLOCK_M, 1]
    if SIGNS:
        quarters = sign_quarters(signs, row, start, k_length, BLOCK_M, BLOCK_N)
        words = load_signs(quarters, BLOCK_M, BLOCK_N, CONFIG.PTX)
    for col in tl.range(start, stop, BLOCK_N, num_stages=1 if LAST else None):
        k_tile = load_tile(
            k, seq.batch, head.kv_head, seq.first_k + col, strides.k, limit,
            BLOCK_N, CONFIG.D_PAD, CONFIG.D, CONFIG.TMA, CHECK,
        )  # fmt: skip  # [BLOCK_N, D_PAD]
        v_tile = load_tile(
            v, seq.batch, head.kv_head, seq.first_k + col, strides.v, limit,
            BLOCK_N, CONFIG.DV_PAD, CONFIG.DV, CONFIG.TMA, CHECK,
        )  # fmt: skip  # [BLOCK_N, DV_PAD]
        if MASKED and (CONFIG.HAS_LENGTHS or CONFIG.PACKED) and CONFIG.TMA:
            k_tile = keep_rows(k_tile, col, seq.end, BLOCK_N)
        # Scores and G: [BLOCK_M, BLOCK_N].
        if not SIGNS:
            score = tl.dot(q_tile, tl.trans(k_tile), input_precision=CONFIG.PRECISION)
        grad = tl.dot(g_tile, tl.trans(v_tile), input_precision=CONFIG.PRECISION)
        if not SIGNS:
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
            if not SIGNS:
                score = tl.where(seen, score, 0.0)
        if CONFIG.DROPOUT:
            grad *= dropout_factor(random, cols[None, :], numbers.dropout)
        # Gradients of the row statistics.
        if SUM_GRADS >= 1:
            grad += constant[:, None]
        if SUM_GRADS == 2:
            grad += slope[:, None] * log2_positive(score, CONFIG.PTX)
        if POWER > 1:
            x = tl.maximum(score, 0.0)  # [BLOCK_M, BLOCK_N]
            grad *= raised(x, POWER - 1)
            if MASKED:
                # Invisible pairs may have NaN gradients.
                grad = tl.where(x > 0, grad, 0.0)
        if SIGNS and MASKED:
            # The signs of tiles that no key tile visits are not initialised.
            grad = tl.where(seen, grad, 0.0)
        if POWER == 1 and CONFIG.PTX and not CONFIG.ROW_SHIFT and k_tile.dtype == tl.bfloat16:
            if SIGNS:
                packed = sign_gated(grad, words, BLOCK_M, BLOCK_N)
            else:
                packed = gated(grad, positive(rectified(score, tl.bfloat16, CONFIG.PTX)))
        else:
            if SIGNS:
                grad = tl.where(sign_bits(words, BLOCK_M, BLOCK_N), grad, 0.0)
            elif POWER == 1:
                grad = tl.where(score > 0, grad, 0.0)
            if CONFIG.ROW_SHIFT:
                shift_total += tl.sum(grad, 1)
            packed = grad.to(k_tile.dtype)
        if SIGNS:
            # Load the signs of the next tile one iteration ahead, to hide the memory latency.
            quarters += 2 * BLOCK_N
            words = load_signs(quarters, BLOCK_M, BLOCK_N, CONFIG.PTX)
        acc = tl.dot(packed, k_tile, acc, input_precision=CONFIG.PRECISION)  # [BLOCK_M, D_PAD]
    return acc, shift_total


@triton.jit(do_not_specialize=LENGTH_DEPENDENT)
def dq_kernel(
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
    """dQ of BLOCK_M queries of one head, and per row dO.O and the sum of dS in score units.

    A program owns one query tile and loops over the key tiles that it sees. The query tile, the
    output gradient tile and the accumulator [BLOCK_M, D] stay in registers; key and value tiles
    pass through shared memory. dO.O is for the gradient of gamma, the sum of dS for that of the
    threshold. With `ROW_NORMALISE`, dO.O is an input. With `SIGNS`, so are the signs of the
    weights, and no scores are computed.
    """
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
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
    limit = seq.first_q + seq.n_q
    TAIL: tl.constexpr = CONFIG.HAS_LENGTHS or CONFIG.PACKED or CONFIG.HAS_THRESHOLD
    EDGES: tl.constexpr = CONFIG.CAUSAL or CONFIG.WINDOW
    SINGLE: tl.constexpr = CONFIG.HAS_MASK or CONFIG.ONE_LOOP
    low, inner_low, inner_high, high = key_range(
        row, tl.minimum(row + BLOCK_M, seq.n_q), offset, seq.end, window, CONFIG.BLOCK_N, TAIL,
        CONFIG,
    )  # fmt: skip
    q_tile = load_tile(
        q, seq.batch, h, seq.first_q + row, strides.q, limit,
        BLOCK_M, CONFIG.D_PAD, CONFIG.D, CONFIG.TMA, True,
    )  # fmt: skip  # [BLOCK_M, D_PAD]
    g_tile = load_tile(
        grad_out, seq.batch, h, seq.first_q + row, strides.grad_out, limit,
        BLOCK_M, CONFIG.DV_PAD, CONFIG.DV, CONFIG.TMA, True,
    )  # fmt: skip  # [BLOCK_M, DV_PAD]
    places = row_places(seq.batch, h, seq.first_q + rows, row_stride_b, row_stride_h, row_stride_t)
    wanted = entropy_wanted(row, h, b, CONFIG)
    factor, constant, slope = row_terms(
        places, rows, rows + offset, seq, h, window,
        RowValues(count, row_sum, row_dot, grad_sum, grad_log), wanted, optional.gamma, numbers,
        CONFIG.SUM_GRADS, CONFIG,
    )  # fmt: skip  # [BLOCK_M] each
    inverse_scale = 1.0 if CONFIG.SCALE_SCORES else 1.0 / numbers.scale
    scaled_threshold = head_threshold(optional.threshold, numbers, inverse_scale, h, CONFIG)
    seed = tl.load(optional.seed) if CONFIG.DROPOUT else 0
    head_mask = optional.mask
    if CONFIG.HAS_MASK:
        head_mask = optional.mask + b.to(tl.int64) * mask_stride_b + h.to(tl.int64) * mask_stride_h
    mask = HeadMask(head_mask, mask_stride_q, strides.mask_key)
    head_signs = signs
    if CONFIG.SIGNS:
        head_signs = signs + bh.to(tl.int64) * head_blocks(q_length, k_length) * PAIRS
    head = Head(b, h, h // CONFIG.GROUP, bh, scaled_threshold, seed)
    D_PAD: tl.constexpr = CONFIG.D_PAD
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    shift_total = tl.zeros([BLOCK_M], tl.float32)

    # Masked tiles, then whole tiles, then masked tiles, as in the forward kernel.
    for part in tl.static_range(3):
        if (
            part == 1
            or (part == 0 and CONFIG.WINDOW and not SINGLE)
            or (part == 2 and (EDGES or TAIL) and not SINGLE)
        ):
            start, stop = loop_bounds(low, inner_low, inner_high, high, part, SINGLE)
            # Two versions of the loop, with and without logarithms; a program runs one of them.
            # With signs, empty loops are skipped by a branch: see `dkv_kernel`.
            for level in tl.static_range(3):
                if (level == CONFIG.SUM_GRADS or (level == 1 and CONFIG.ENTROPY_EVERY > 1)) and (
                    (not CONFIG.SIGNS or start < stop)
                    and (CONFIG.ENTROPY_EVERY == 1 or wanted == (level == 2))
                ):
                    acc, shift_total = _accumulate_keys(
                        acc, shift_total, q_tile, g_tile, constant, slope, k, v, mask, head_signs,
                        start, stop, row, rows, seq, head, k_length, window, strides, numbers,
                        part != 1 or SINGLE, part == 2 and not EDGES,
                        part != 1 or SINGLE or not (CONFIG.CAUSAL or TAIL), level, CONFIG,
                    )  # fmt: skip

    factor *= CONFIG.POWER
    if CONFIG.ROW_SHIFT:
        tl.store(row_shift + places, shift_total * factor * inverse_scale, mask=rows < seq.n_q)
    if CONFIG.ROW_DOT:
        o_tile = load_tile(
            out, seq.batch, h, seq.first_q + row, strides.out, limit,
            BLOCK_M, CONFIG.DV_PAD, CONFIG.DV, False, True,
        )  # fmt: skip  # [BLOCK_M, DV_PAD]
        dot = tl.sum(o_tile.to(tl.float32) * g_tile.to(tl.float32), 1)  # [BLOCK_M]
        tl.store(row_dot + places, dot, mask=rows < seq.n_q)
    if CONFIG.SCALE_SCORES:
        factor *= numbers.scale
    store_tile(
        dq, (acc * factor[:, None]).to(q_tile.dtype), seq.batch, h, seq.first_q + row, strides.dq,
        limit, BLOCK_M, CONFIG.D_PAD, CONFIG.D, CONFIG.TMA and not CONFIG.PACKED,
    )  # fmt: skip
