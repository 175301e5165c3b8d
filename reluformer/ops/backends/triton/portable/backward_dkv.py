"""Backward kernel for dK and dV, and the formulas of the whole backward pass.

With x and C_i as in the forward kernel and G = dL/dw,

    G_ij = keep_ij (dO_i . v_j) + g_i + e_i (log w_ij + 1),     dS_ij = C_i p x^(p-1) G_ij [x > 0],

where g and e are the gradients of the row sum and of sum w log w. Only q, k, v and the output
gradient are read. With row normalisation by T_i = sum_j w_ij + epsilon (`ROW_NORMALISE`),

    G_ij = keep_ij (dO_i . v_j) / T_i + g_i - (dO_i . O_i) / T_i + e_i (log w_ij + 1).

That is the first formula with C_i / T_i in place of C_i, T_i e_i in place of e_i and
T_i g_i - dO_i . O_i in place of g_i, so only `row_terms` depends on the row normalisation.

`dkv_kernel` owns a key tile (dK, dV: four products) and `dq_kernel` a query tile (dQ: three). Each
sums in a fixed order, so results are reproducible bit by bit. For power 1, dQ needs only [x > 0] of
the scores. With `SIGNS`, `dkv_kernel` stores these bits and `dq_kernel` computes two products
instead of three. Accumulating dQ in `dkv_kernel` would save one more product, but atomic adds, by
pointers or descriptors, took longer on an H200.
"""

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
    load_sequence,
    load_tile,
    log2_positive,
    loop_bounds,
    padded_rows,
    query_range,
    raised,
    rectified,
    row_factor,
    row_places,
    store_tile,
    visible,
    visible_count,
)
from reluformer.ops.backends.triton.portable.row_terms import row_terms
from reluformer.ops.backends.triton.portable.sign_bits import (
    WORDS,
    gate_words,
    gated,
    head_blocks,
    positive,
    sign_words,
    store_signs,
)


@triton.jit
def _accumulate_queries(
    dk_acc,
    dv_acc,
    k_tile,
    v_tile,
    q,
    grad_out,
    terms,
    values,
    mask,
    signs,
    gamma,
    start,
    stop,
    col,
    seq,
    head,
    q_length,
    k_length,
    window,
    row_strides,
    strides,
    numbers,
    MASKED: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Add the queries [start, stop) of one head to dK and dV of a key tile."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    POWER: tl.constexpr = CONFIG.POWER
    # Row factors that must be applied here.
    FACTORS: tl.constexpr = CONFIG.ROW_FACTORS and not CONFIG.GRAD_SCALED
    # Gate packed bf16 pairs with one instruction instead of comparing float32 scores.
    BY_PAIRS: tl.constexpr = (
        POWER == 1 and CONFIG.PTX and not CONFIG.DROPOUT and k_tile.dtype == tl.bfloat16
    )
    offset = seq.n_k - seq.n_q
    limit = seq.first_q + seq.n_q
    cols = col + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    for row in tl.range(start, stop, BLOCK_M):
        rows = tl.multiple_of(row, BLOCK_M) + tl.arange(0, BLOCK_M)  # [BLOCK_M]
        q_tile = load_tile(
            q, seq.batch, head.h, seq.first_q + row, strides.q, limit,
            BLOCK_M, CONFIG.D_PAD, CONFIG.D, CONFIG.TMA, True,
        )  # fmt: skip  # [BLOCK_M, D_PAD]
        g_tile = load_tile(
            grad_out, seq.batch, head.h, seq.first_q + row, strides.grad_out, limit,
            BLOCK_M, CONFIG.DV_PAD, CONFIG.DV, CONFIG.TMA, True,
        )  # fmt: skip  # [BLOCK_M, DV_PAD]
        if MASKED and CONFIG.PACKED and CONFIG.TMA:
            q_tile = keep_rows(q_tile, row, seq.n_q, BLOCK_M)
            g_tile = keep_rows(g_tile, row, seq.n_q, BLOCK_M)
        # Scores are transposed: [BLOCK_N, BLOCK_M].
        score = tl.dot(k_tile, tl.trans(q_tile), input_precision=CONFIG.PRECISION)
        if CONFIG.SCALE_SCORES:
            score = score * numbers.scale
        if CONFIG.HAS_THRESHOLD:
            score = score - head.scaled_threshold
        if MASKED:
            seen = visible(
                (rows + offset)[None, :], rows[None, :], cols[:, None], seq.end, window, seq.n_q,
                mask, CONFIG,
            )  # fmt: skip  # [BLOCK_N, BLOCK_M]
            score = tl.where(seen, score, 0.0)
        if FACTORS:
            places = row_places(
                seq.batch, head.h, seq.first_q + rows,
                row_strides[0], row_strides[1], row_strides[2],
            )  # fmt: skip
            factor, _, _ = row_terms(
                places, rows, rows + offset, seq, head.h, window, values, True, gamma, numbers, 0,
                CONFIG,
            )  # fmt: skip  # [BLOCK_M]
        if CONFIG.DROPOUT:
            random = dropout_keys(head.seed, rows, head.bh)[None, :]  # [1, BLOCK_M]
            kept = dropout_factor(random, cols[:, None], numbers.dropout)  # [BLOCK_N, BLOCK_M]
        if POWER > 1:
            # x^(p-1) is both gate and source of log x: x need not stay in registers.
            x = tl.maximum(score, 0.0)
            relu_pow_minus_1 = raised(x, POWER - 1)  # [BLOCK_N, BLOCK_M]
            weight = x * relu_pow_minus_1
        else:
            relu_pow_minus_1 = score
            weight = score
        # C_i > 0 commutes with max(., 0), so it may be applied before the packed conversion.
        if FACTORS:
            weight *= factor[None, :]
        if CONFIG.DROPOUT:
            weight = tl.where(score > 0, weight, 0.0) * kept
        if POWER > 1 or CONFIG.DROPOUT:
            packed = weight.to(g_tile.dtype)
        else:
            packed = rectified(weight, g_tile.dtype, CONFIG.PTX)
        # [BLOCK_N, DV_PAD]
        dv_acc = tl.dot(packed, g_tile, dv_acc, input_precision=CONFIG.PRECISION)
        if BY_PAIRS:
            gates = positive(packed)  # [BLOCK_N, BLOCK_M], int16
        if CONFIG.SIGNS:
            # Overlaps with the product. Not from float16 weights, which underflow where scores
            # do not.
            if BY_PAIRS:
                words = gate_words(gates, BLOCK_N, BLOCK_M)
            else:
                words = sign_words(score, BLOCK_N, BLOCK_M)
            store_signs(signs, words, row, col, k_length, BLOCK_N, BLOCK_M, CONFIG.PTX)
        # G, transposed: [BLOCK_N, BLOCK_M].
        grad = tl.dot(v_tile, tl.trans(g_tile), input_precision=CONFIG.PRECISION)
        if CONFIG.DROPOUT:
            grad *= kept
        if CONFIG.SUM_GRADS >= 1:
            grad += tl.load(terms + rows)[None, :]
        if CONFIG.SUM_GRADS == 2:
            slopes = terms + padded_rows(q_length) + rows
            if CONFIG.ENTROPY_EVERY == 1:
                grad += tl.load(slopes)[None, :] * log2_positive(relu_pow_minus_1, CONFIG.PTX)
            else:
                if entropy_wanted(row, head.h, head.b, CONFIG):
                    grad += tl.load(slopes)[None, :] * log2_positive(relu_pow_minus_1, CONFIG.PTX)
        if POWER > 1:
            grad *= relu_pow_minus_1
        if FACTORS:
            grad *= factor[None, :]
        if BY_PAIRS:
            grad = gated(grad, gates)
        else:
            if POWER == 1 or MASKED:
                # Above power 1 the factor is already 0, but invisible pairs may have NaN gradients.
                grad = tl.where(relu_pow_minus_1 > 0, grad, 0.0)
            grad = grad.to(q_tile.dtype)
        # [BLOCK_N, D_PAD]
        dk_acc = tl.dot(grad, q_tile, dk_acc, input_precision=CONFIG.PRECISION)
    return dk_acc, dv_acc


@triton.jit(do_not_specialize=LENGTH_DEPENDENT)
def dkv_kernel(
    q,
    k,
    v,
    grad_out,
    dk,
    dv,
    signs,
    terms,
    count,
    row_sum,
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
    """dK and dV of BLOCK_N keys of one key head, summed over its query heads and all queries.

    A program owns one key tile and loops over the query heads of its group and the query tiles that
    see it. The accumulators [BLOCK_N, D] and [BLOCK_N, DV] stay in registers; query and output
    gradient tiles pass through shared memory.

    `ROW_FACTORS`: C_i (or C_i / T_i) differs between rows. It is applied in the loop, or, with
    `GRAD_SCALED`, is already part of `grad_out` and `terms`. Otherwise it is applied once, after
    the loop. `row_terms_kernel` computes `terms`: the loop would repeat that for every key tile.
    With `SIGNS` the signs of the weights are stored for `dq_kernel`.
    """
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    GROUP: tl.constexpr = CONFIG.GROUP
    # The grid is (sequence, key head, tile), tiles fastest.
    kv_heads = heads // GROUP
    tiles = tl.cdiv(k_length, BLOCK_N)
    tile = tl.program_id(0) % tiles
    b = tl.program_id(0) // tiles // kv_heads
    kv_head = tl.program_id(0) // tiles % kv_heads
    seq = load_sequence(b, optional, q_length, k_length, CONFIG)
    col = tile * BLOCK_N
    if CONFIG.PACKED:  # noqa: SIM102 (the outer test is compiled away)
        if col >= seq.n_k:
            return
    offset = seq.n_k - seq.n_q
    limit = seq.first_k + seq.n_k
    EDGES: tl.constexpr = CONFIG.CAUSAL or CONFIG.WINDOW
    SINGLE: tl.constexpr = CONFIG.HAS_MASK or CONFIG.ONE_LOOP
    low, inner_low, inner_high, high = query_range(
        col, tl.minimum(col + BLOCK_N, seq.end), offset, seq.n_q, window, CONFIG
    )
    k_tile = load_tile(
        k, seq.batch, kv_head, seq.first_k + col, strides.k, limit,
        BLOCK_N, CONFIG.D_PAD, CONFIG.D, CONFIG.TMA, True,
    )  # fmt: skip  # [BLOCK_N, D_PAD]
    v_tile = load_tile(
        v, seq.batch, kv_head, seq.first_k + col, strides.v, limit,
        BLOCK_N, CONFIG.DV_PAD, CONFIG.DV, CONFIG.TMA, True,
    )  # fmt: skip  # [BLOCK_N, DV_PAD]
    inverse_scale = 1.0 if CONFIG.SCALE_SCORES else 1.0 / numbers.scale
    seed = tl.load(optional.seed) if CONFIG.DROPOUT else 0
    values = RowValues(count, row_sum, None, None, None)
    row_strides = (row_stride_b, row_stride_h, row_stride_t)
    D_PAD: tl.constexpr = CONFIG.D_PAD
    dk_acc = tl.zeros([BLOCK_N, D_PAD], tl.float32)
    DV_PAD: tl.constexpr = CONFIG.DV_PAD
    dv_acc = tl.zeros([BLOCK_N, DV_PAD], tl.float32)
    for member in tl.range(0, GROUP, num_stages=1):
        # One query head of the group.
        h = kv_head * GROUP + member
        bh = b * heads + h
        scaled_threshold = head_threshold(optional.threshold, numbers, inverse_scale, h, CONFIG)
        head = Head(b, h, kv_head, bh, scaled_threshold, seed)
        head_mask = optional.mask
        if CONFIG.HAS_MASK:
            head_mask = (
                optional.mask + b.to(tl.int64) * mask_stride_b + h.to(tl.int64) * mask_stride_h
            )
        mask = HeadMask(head_mask, mask_stride_q, strides.mask_key)
        head_terms = terms
        if CONFIG.SUM_GRADS >= 1:
            head_terms = terms + bh.to(tl.int64) * (CONFIG.SUM_GRADS * padded_rows(q_length))
        head_signs = signs
        if CONFIG.SIGNS:
            head_signs = signs + bh.to(tl.int64) * head_blocks(q_length, k_length) * WORDS
        for part in tl.static_range(3):
            if (
                part == 1
                or (part == 0 and EDGES and not SINGLE)
                or (part == 2 and (CONFIG.WINDOW or CONFIG.PACKED) and not SINGLE)
            ):
                start, stop = loop_bounds(low, inner_low, inner_high, high, part, SINGLE)
                # With signs, an empty loop is skipped by a branch: where a path around a loop joins
                # products in flight, the assembler serialises all products of the loop.
                if not CONFIG.SIGNS or start < stop:
                    dk_acc, dv_acc = _accumulate_queries(
                        dk_acc, dv_acc, k_tile, v_tile, q, grad_out, head_terms, values, mask,
                        head_signs, optional.gamma, start, stop, col, seq, head, q_length, k_length,
                        window, row_strides, strides, numbers, part != 1 or SINGLE, CONFIG,
                    )  # fmt: skip

    value_factor = 1.0
    if not CONFIG.ROW_FACTORS:
        # All rows have the same factor: that of the first query head of the group.
        n = visible_count(col, seq.end, window, CONFIG)
        value_factor = row_factor(n, optional.gamma, kv_head * GROUP, numbers, CONFIG)
    key_factor = value_factor * CONFIG.POWER
    if CONFIG.SCALE_SCORES:
        key_factor *= numbers.scale
    # Gradients of keys past the valid length are zero.
    dk_acc = keep_rows(dk_acc * key_factor, col, seq.end, BLOCK_N)
    dv_acc = keep_rows(dv_acc * value_factor, col, seq.end, BLOCK_N)
    store_tile(
        dk, dk_acc.to(k_tile.dtype), seq.batch, kv_head, seq.first_k + col, strides.dk, limit,
        BLOCK_N, CONFIG.D_PAD, CONFIG.D, CONFIG.TMA and not CONFIG.PACKED,
    )  # fmt: skip
    store_tile(
        dv, dv_acc.to(v_tile.dtype), seq.batch, kv_head, seq.first_k + col, strides.dv, limit,
        BLOCK_N, CONFIG.DV_PAD, CONFIG.DV, CONFIG.TMA and not CONFIG.PACKED,
    )  # fmt: skip
