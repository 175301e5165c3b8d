"""Backward kernel for short sequences: dQ, dK and dV in one pass; formulas in `backward_dkv.py`.

One tile holds all queries and keys of a sequence, so scores are computed once: five products
instead of seven, and every tensor is read once.
"""

import triton
import triton.language as tl

from reluformer.ops.backends.triton.portable.arguments import (
    LENGTH_DEPENDENT,
    HeadMask,
    RowValues,
)
from reluformer.ops.backends.triton.portable.device import (
    entropy_wanted,
    head_threshold,
    load_sequence,
    load_tile,
    log2_positive,
    raised,
    row_places,
    store_tile,
    visible,
)
from reluformer.ops.backends.triton.portable.row_terms import row_terms


@triton.jit(do_not_specialize=LENGTH_DEPENDENT)
def one_pass_kernel(
    q,
    k,
    v,
    grad_out,
    dq,
    dk,
    dv,
    out,
    grad_sum,
    grad_log,
    row_sum,
    row_dot,
    row_shift,
    optional,
    strides,
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
    """Gradients of one key head of a sequence of at most BLOCK_M queries and BLOCK_N keys.

    A program owns a key head and loops over the query heads of its group. All tiles are in
    registers; products read them through shared memory. Without masks and dropout.
    """
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    GROUP: tl.constexpr = CONFIG.GROUP
    POWER: tl.constexpr = CONFIG.POWER
    kv_heads = heads // GROUP
    b = tl.program_id(0) // kv_heads
    kv_head = tl.program_id(0) % kv_heads
    seq = load_sequence(b, optional, q_length, k_length, CONFIG)
    rows = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    cols = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    position = rows + seq.n_k - seq.n_q  # [BLOCK_M]
    last_q = seq.first_q + seq.n_q
    # Keys and values in the padding may be NaN.
    last_valid = seq.first_k + seq.end
    k_tile = load_tile(
        k, seq.batch, kv_head, seq.first_k, strides.k, last_valid,
        BLOCK_N, CONFIG.D_PAD, CONFIG.D, False, True,
    )  # fmt: skip  # [BLOCK_N, D_PAD]
    v_tile = load_tile(
        v, seq.batch, kv_head, seq.first_k, strides.v, last_valid,
        BLOCK_N, CONFIG.DV_PAD, CONFIG.DV, False, True,
    )  # fmt: skip  # [BLOCK_N, DV_PAD]
    seen = visible(
        position[:, None], rows[:, None], cols[None, :], seq.end, window, seq.n_q,
        HeadMask(None, 0, 0), CONFIG,
    )  # fmt: skip  # [BLOCK_M, BLOCK_N]
    inverse_scale = 1.0 if CONFIG.SCALE_SCORES else 1.0 / numbers.scale
    D_PAD: tl.constexpr = CONFIG.D_PAD
    dk_acc = tl.zeros([BLOCK_N, D_PAD], tl.float32)
    DV_PAD: tl.constexpr = CONFIG.DV_PAD
    dv_acc = tl.zeros([BLOCK_N, DV_PAD], tl.float32)
    for member in tl.range(0, GROUP, num_stages=1):
        h = kv_head * GROUP + member
        q_tile = load_tile(
            q, seq.batch, h, seq.first_q, strides.q, last_q,
            BLOCK_M, CONFIG.D_PAD, CONFIG.D, False, True,
        )  # fmt: skip  # [BLOCK_M, D_PAD]
        g_tile = load_tile(
            grad_out, seq.batch, h, seq.first_q, strides.grad_out, last_q,
            BLOCK_M, CONFIG.DV_PAD, CONFIG.DV, False, True,
        )  # fmt: skip  # [BLOCK_M, DV_PAD]
        places = row_places(
            seq.batch, h, seq.first_q + rows, row_stride_b, row_stride_h, row_stride_t
        )
        factor, constant, slope = row_terms(
            places, rows, position, seq, h, window,
            RowValues(None, row_sum, None, grad_sum, grad_log), entropy_wanted(h * 0, h, b, CONFIG),
            optional.gamma, numbers, CONFIG.SUM_GRADS, CONFIG,
        )  # fmt: skip  # [BLOCK_M] each
        if CONFIG.ROW_DOT or CONFIG.ROW_NORMALISE:
            o_tile = load_tile(
                out, seq.batch, h, seq.first_q, strides.out, last_q,
                BLOCK_M, CONFIG.DV_PAD, CONFIG.DV, False, True,
            )  # fmt: skip  # [BLOCK_M, DV_PAD]
            dot = tl.sum(o_tile.to(tl.float32) * g_tile.to(tl.float32), 1)  # [BLOCK_M]
            if CONFIG.ROW_DOT:
                tl.store(row_dot + places, dot, mask=rows < seq.n_q)
            if CONFIG.ROW_NORMALISE:
                constant -= dot
        # [BLOCK_M, BLOCK_N], as all tensors of pairs.
        score = tl.dot(q_tile, tl.trans(k_tile), input_precision=CONFIG.PRECISION)
        if CONFIG.SCALE_SCORES:
            score = score * numbers.scale
        if CONFIG.HAS_THRESHOLD:
            score -= head_threshold(optional.threshold, numbers, inverse_scale, h, CONFIG)
        x = tl.maximum(tl.where(seen, score, 0.0), 0.0)
        slope_of_x = factor[:, None]
        if POWER > 1:
            slope_of_x = slope_of_x * raised(x, POWER - 1)
        weight = (x * slope_of_x).to(g_tile.dtype)
        dv_acc = tl.dot(tl.trans(weight), g_tile, dv_acc, input_precision=CONFIG.PRECISION)
        grad = tl.dot(g_tile, tl.trans(v_tile), input_precision=CONFIG.PRECISION)
        if CONFIG.SUM_GRADS >= 1:
            grad += constant[:, None]
        if CONFIG.SUM_GRADS == 2:
            grad += slope[:, None] * log2_positive(x, CONFIG.PTX)
        grad = tl.where(x > 0, grad * slope_of_x * POWER, 0.0)
        if CONFIG.ROW_SHIFT:
            shift = tl.sum(grad, 1) * inverse_scale  # [BLOCK_M]
            tl.store(row_shift + places, shift, mask=rows < seq.n_q)
        if CONFIG.SCALE_SCORES:
            grad *= numbers.scale
        packed = grad.to(q_tile.dtype)
        dk_acc = tl.dot(tl.trans(packed), q_tile, dk_acc, input_precision=CONFIG.PRECISION)
        dq_tile = tl.dot(packed, k_tile, input_precision=CONFIG.PRECISION)  # [BLOCK_M, D_PAD]
        store_tile(
            dq, dq_tile.to(q_tile.dtype), seq.batch, h, seq.first_q, strides.dq, last_q,
            BLOCK_M, CONFIG.D_PAD, CONFIG.D, False,
        )  # fmt: skip
    last_k = seq.first_k + seq.n_k
    store_tile(
        dk, dk_acc.to(k_tile.dtype), seq.batch, kv_head, seq.first_k, strides.dk, last_k,
        BLOCK_N, CONFIG.D_PAD, CONFIG.D, False,
    )  # fmt: skip
    store_tile(
        dv, dv_acc.to(v_tile.dtype), seq.batch, kv_head, seq.first_k, strides.dv, last_k,
        BLOCK_N, CONFIG.DV_PAD, CONFIG.DV, False,
    )  # fmt: skip
