"""Backward kernels. With x and C_i as in the forward kernel and G = dL/dw,

    G_ij = keep_ij (dO_i . v_j) + g_i + e_i (log w_ij + 1),     dS_ij = C_i p x^(p-1) G_ij [x > 0],

where g and e are the gradients of the row sum and of sum w log w. Nothing but q, k, v and the
output gradient is read. If rows were divided by T_i = sum_j w_ij + epsilon (`DIVIDE`), then

    G_ij = keep_ij (dO_i . v_j) / T_i + g_i - (dO_i . O_i) / T_i + e_i (log w_ij + 1)

is the same with C_i / T_i in place of C_i, T_i e_i of e_i and T_i g_i - dO_i . O_i of g_i: only
`row_terms` knows. O is read once, in a pass over rows.

`keys_kernel` owns a tile of keys (dK, dV: four products), `queries_kernel` a tile of queries (dQ:
three); each sums in a fixed order, so results are repeatable bit by bit. For power 1 all that dQ
needs of the scores is [x > 0]: with `SIGNS` the first kernel leaves these bits to the second, which
then makes two products. Adding dQ up in the first kernel would spare one more, but took longer on
an H200, by atomics on pointers and by descriptors alike: sums in memory are slower than products.
"""

import triton
import triton.language as tl

from reluformer.ops.backends.triton.portable.device import (
    LENGTH_DEPENDENT,
    dropout_factor,
    dropout_keys,
    entropy_wanted,
    head_threshold,
    keep_rows,
    load_tile,
    log2_positive,
    padded_rows,
    query_range,
    raised,
    rectified,
    row_factor,
    row_places,
    sequence,
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
def _walk_queries(
    dk_acc,
    dv_acc,
    k_tile,
    v_tile,
    q,
    grad_out,
    terms,
    count,
    row_sum,
    mask,
    signs,
    gamma,
    low,
    high,
    col,
    n_q,
    q_length,
    k_length,
    batch,
    b,
    h,
    first_q,
    offset,
    end,
    window,
    cut,
    scale,
    unit,
    length_exponent,
    epsilon,
    seed_value,
    bh,
    dropout,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_gb,
    stride_gh,
    stride_gt,
    stride_mq,
    stride_mk,
    stride_sb,
    stride_sh,
    stride_st,
    MASKED: tl.constexpr,
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
    VARLEN: tl.constexpr,
    HAS_GAMMA: tl.constexpr,
    DIVIDE: tl.constexpr,
    HAS_THRESHOLD: tl.constexpr,
    PRESCALE: tl.constexpr,
    GRADS: tl.constexpr,
    EVERY: tl.constexpr,
    DROPOUT: tl.constexpr,
    ROW_SCALE: tl.constexpr,
    PRESCALED: tl.constexpr,
    SIGNS: tl.constexpr,
    TMA: tl.constexpr,
    PTX: tl.constexpr,
    PRECISION: tl.constexpr,
):
    BY_PAIRS: tl.constexpr = POWER == 1 and PTX and not DROPOUT and k_tile.dtype == tl.bfloat16
    cols = col + tl.arange(0, KEYS)
    for row in tl.range(low, high, QUERIES):
        rows = tl.multiple_of(row, QUERIES) + tl.arange(0, QUERIES)
        q_tile = load_tile(
            q, batch, h, first_q + row, stride_qb, stride_qh, stride_qt, first_q + n_q,
            QUERIES, D_PAD, D, TMA, True,
        )  # fmt: skip
        g_tile = load_tile(
            grad_out, batch, h, first_q + row, stride_gb, stride_gh, stride_gt, first_q + n_q,
            QUERIES, DV_PAD, DV, TMA, True,
        )  # fmt: skip
        if MASKED and VARLEN and TMA:
            q_tile = keep_rows(q_tile, row, n_q, QUERIES)
            g_tile = keep_rows(g_tile, row, n_q, QUERIES)
        score = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
        if PRESCALE:
            score = score * scale
        if HAS_THRESHOLD:
            score = score - cut
        if MASKED:
            seen = visible(
                (rows + offset)[None, :], rows[None, :], cols[:, None], end, window,
                mask, stride_mq, stride_mk, n_q, CAUSAL, WINDOW, HAS_MASK,
            )  # fmt: skip
            score = tl.where(seen, score, 0.0)
        if ROW_SCALE and not PRESCALED:
            stats = row_places(batch, h, first_q + rows, stride_sb, stride_sh, stride_st)
            factor, _, _ = row_terms(
                stats, rows, n_q, rows + offset, end, window, count, count, count, row_sum, count,
                True, unit, gamma, h, length_exponent, epsilon,
                CAUSAL, WINDOW, HAS_MASK, HAS_GAMMA, DIVIDE, POWER, 0,
            )  # fmt: skip
        if DROPOUT:
            random = dropout_keys(seed_value, rows, bh)[None, :]
            kept = dropout_factor(random, cols[:, None], dropout)
        if POWER > 1:
            # x^(p-1) gates and gives log x too: x need not be kept until the gradient arrives.
            x = tl.maximum(score, 0.0)
            steep = raised(x, POWER - 1)
            weight = x * steep
        else:
            steep = score
            weight = score
        # C_i > 0 commutes with max(., 0), so it may be applied before the packed conversion.
        if ROW_SCALE and not PRESCALED:
            weight *= factor[None, :]
        if DROPOUT:
            weight = tl.where(score > 0, weight, 0.0) * kept
        if POWER > 1 or DROPOUT:
            packed = weight.to(g_tile.dtype)
        else:
            packed = rectified(weight, g_tile.dtype, PTX)
        dv_acc = tl.dot(packed, g_tile, dv_acc, input_precision=PRECISION)
        if BY_PAIRS:
            gates = positive(packed)
        if SIGNS:
            # While products are under way. float16 has no weights as small as scores can be.
            if BY_PAIRS:
                words = gate_words(gates, KEYS, QUERIES)
            else:
                words = sign_words(score, KEYS, QUERIES)
            store_signs(signs, words, row, col, k_length, KEYS, QUERIES, PTX)
        grad = tl.dot(v_tile, tl.trans(g_tile), input_precision=PRECISION)
        if DROPOUT:
            grad *= kept
        if GRADS >= 1:
            grad += tl.load(terms + rows)[None, :]
        if GRADS == 2:
            slopes = terms + padded_rows(q_length) + rows
            if EVERY == 1:
                grad += tl.load(slopes)[None, :] * log2_positive(steep, PTX)
            else:
                if entropy_wanted(row, h, b, EVERY):
                    grad += tl.load(slopes)[None, :] * log2_positive(steep, PTX)
        if POWER > 1:
            grad *= steep
        if ROW_SCALE and not PRESCALED:
            grad *= factor[None, :]
        if BY_PAIRS:
            grad = gated(grad, gates)
        else:
            if POWER == 1 or MASKED:
                # Above power 1 it is a matter of gradients of what is not seen, which may be NaN.
                grad = tl.where(steep > 0, grad, 0.0)
            grad = grad.to(q_tile.dtype)
        dk_acc = tl.dot(grad, q_tile, dk_acc, input_precision=PRECISION)
    return dk_acc, dv_acc


@triton.jit(do_not_specialize=LENGTH_DEPENDENT)
def keys_kernel(
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
    stride_dkb,
    stride_dkh,
    stride_dkt,
    stride_dvb,
    stride_dvh,
    stride_dvt,
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
    ROW_SCALE: tl.constexpr,
    PRESCALED: tl.constexpr,
    SIGNS: tl.constexpr,
    ONE_LOOP: tl.constexpr,
    TMA: tl.constexpr,
    PTX: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dK and dV of a tile of keys, summed over the query heads of its group and all queries.

    `ROW_SCALE`: C_i (or C_i / T_i) differs between rows, so it is applied in the loop (or,
    `PRESCALED`, has been multiplied into `grad_out` and the terms); otherwise once at the end.
    `terms` are made by `row_terms_kernel`: the loop would compute them again for every tile of
    keys. With `SIGNS` those of the weights are left to `queries_kernel`.
    """
    kv_heads = heads // GROUP
    tiles = tl.cdiv(k_length, KEYS)
    tile = tl.program_id(0) % tiles
    b = tl.program_id(0) // tiles // kv_heads
    kv_head = tl.program_id(0) // tiles % kv_heads
    batch, first_q, first_k, n_q, n_k, end = sequence(
        b, cu_q, cu_k, lengths, q_length, k_length, VARLEN, HAS_LENGTHS
    )
    col = tile * KEYS
    if VARLEN:  # noqa: SIM102 (the outer test is compiled away)
        if col >= n_k:
            return
    offset = n_k - n_q
    EDGES: tl.constexpr = CAUSAL or WINDOW
    SINGLE: tl.constexpr = HAS_MASK or ONE_LOOP
    low, inner_low, inner_high, high = query_range(
        col, tl.minimum(col + KEYS, end), offset, n_q, window, QUERIES, CAUSAL, WINDOW, VARLEN
    )
    k_tile = load_tile(
        k, batch, kv_head, first_k + col, stride_kb, stride_kh, stride_kt, first_k + n_k,
        KEYS, D_PAD, D, TMA, True,
    )  # fmt: skip
    v_tile = load_tile(
        v, batch, kv_head, first_k + col, stride_vb, stride_vh, stride_vt, first_k + n_k,
        KEYS, DV_PAD, DV, TMA, True,
    )  # fmt: skip
    inverse_scale = 1.0 if PRESCALE else 1.0 / scale
    seed_value = tl.load(seed) if DROPOUT else 0
    dk_acc = tl.zeros([KEYS, D_PAD], tl.float32)
    dv_acc = tl.zeros([KEYS, DV_PAD], tl.float32)
    for member in tl.range(0, GROUP, num_stages=1):
        h = kv_head * GROUP + member
        bh = b * heads + h
        cut = head_threshold(threshold, threshold_value, inverse_scale, h, THRESHOLD_TENSOR)
        mask_head = mask
        if HAS_MASK:
            mask_head = mask + b.to(tl.int64) * stride_mb + h.to(tl.int64) * stride_mh
        terms_head = terms
        if GRADS >= 1:
            terms_head = terms + bh.to(tl.int64) * (GRADS * padded_rows(q_length))
        signs_head = signs
        if SIGNS:
            signs_head = signs + bh.to(tl.int64) * head_blocks(q_length, k_length) * WORDS
        for part in tl.static_range(3):
            if (
                part == 1
                or (part == 0 and EDGES and not SINGLE)
                or (part == 2 and (WINDOW or VARLEN) and not SINGLE)
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
                # Where a path around a loop meets products in flight, the assembler makes all
                # products of the loop wait for each other.
                if not SIGNS or start < stop:
                    dk_acc, dv_acc = _walk_queries(
                        dk_acc, dv_acc, k_tile, v_tile, q, grad_out, terms_head, count, row_sum,
                        mask_head, signs_head, gamma, start, stop, col, n_q, q_length, k_length,
                        batch, b, h, first_q, offset, end, window, cut, scale, unit,
                        length_exponent, epsilon, seed_value, bh, dropout,
                        stride_qb, stride_qh, stride_qt, stride_gb, stride_gh, stride_gt,
                        stride_mq, stride_mk, stride_sb, stride_sh, stride_st,
                        part != 1 or SINGLE, QUERIES, KEYS, D, DV, D_PAD, DV_PAD, POWER, CAUSAL,
                        WINDOW, HAS_MASK, VARLEN, HAS_GAMMA, DIVIDE, HAS_THRESHOLD, PRESCALE, GRADS,
                        EVERY, DROPOUT, ROW_SCALE, PRESCALED, SIGNS, TMA, PTX, PRECISION,
                    )  # fmt: skip

    value_factor = 1.0
    if not ROW_SCALE:
        n = visible_count(col, end, window, CAUSAL, WINDOW)
        value_factor = row_factor(n, unit, gamma, kv_head * GROUP, length_exponent, HAS_GAMMA)
    key_factor = value_factor * POWER
    if PRESCALE:
        key_factor *= scale
    # A key past the end is a row of its own here: its gradients are zero.
    dk_acc = keep_rows(dk_acc * key_factor, col, end, KEYS)
    dv_acc = keep_rows(dv_acc * value_factor, col, end, KEYS)
    store_tile(
        dk, dk_acc.to(k_tile.dtype), batch, kv_head, first_k + col,
        stride_dkb, stride_dkh, stride_dkt, first_k + n_k, KEYS, D_PAD, D, TMA and not VARLEN,
    )  # fmt: skip
    store_tile(
        dv, dv_acc.to(v_tile.dtype), batch, kv_head, first_k + col,
        stride_dvb, stride_dvh, stride_dvt, first_k + n_k, KEYS, DV_PAD, DV, TMA and not VARLEN,
    )  # fmt: skip
