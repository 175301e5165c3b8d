"""Row factors and row terms of the backward pass, and kernels that compute them for all rows."""

import triton
import triton.language as tl

from reluformer.ops.backends.triton.portable.arguments import LENGTH_DEPENDENT, RowValues
from reluformer.ops.backends.triton.portable.device import (
    BLOCK,
    LN2,
    entropy_wanted,
    load_sequence,
    load_tile,
    padded_rows,
    row_factor,
    row_places,
    store_tile,
    visible_count,
    with_scalar,
)


@triton.jit
def row_terms(
    places,
    rows,
    position,
    seq,
    h,
    window,
    values,
    wanted,
    gamma,
    numbers,
    SUM_GRADS: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """(C_i, constant part of G, coefficient of log2 x in G) for a tile of rows.

    Where sums of w log w are not `wanted`, their gradient counts as zero. With `ROW_NORMALISE` the
    first result is C_i / T_i and the other two are multiplied by T_i; `values.row_dot` is dO.O,
    which the caller subtracts if it is None, and `values.grad_sum` may be None.
    """
    if CONFIG.HAS_MASK:
        n = tl.load(values.count + places, mask=rows < seq.n_q, other=0.0)
    else:
        n = visible_count(position, seq.end, window, CONFIG)
    factor = row_factor(n, gamma, h, numbers, CONFIG)  # [rows], as all tensors here
    constant = tl.zeros_like(factor)
    slope = tl.zeros_like(factor)
    if SUM_GRADS >= 1 and values.grad_sum is not None:
        constant = tl.load(values.grad_sum + places, mask=rows < seq.n_q, other=0.0)
    if SUM_GRADS == 2:
        # d(w log w) = (log w + 1) dw with log w = log C_i + p log x.
        sampled = with_scalar(rows < seq.n_q, wanted)
        e = tl.load(values.grad_log + places, mask=sampled, other=0.0)
        constant += e * (1.0 + LN2 * tl.log2(tl.where(factor > 0, factor, 1.0)))
        slope = e * (CONFIG.POWER * LN2)
    if CONFIG.ROW_NORMALISE:
        # T_i; G is scaled by it so that one factor C_i / T_i remains.
        total = tl.load(values.row_sum + places, mask=rows < seq.n_q, other=0.0) + numbers.epsilon
        factor /= total
        slope *= total
        if SUM_GRADS >= 1:
            constant *= total
            if values.row_dot is not None:
                constant -= tl.load(values.row_dot + places, mask=rows < seq.n_q, other=0.0)
    return factor, constant, slope


@triton.jit(do_not_specialize=LENGTH_DEPENDENT)
def row_terms_kernel(
    grad_sum,
    grad_log,
    terms,
    count,
    row_sum,
    row_dot,
    optional,
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
    """Constant and slope of `row_terms` for BLOCK rows of one head, all in registers.

    With `GRAD_SCALED` both are multiplied by C_i. Above power 2 the slope is that of log2 x^(p-1),
    which `dkv_kernel` keeps instead of x. `terms` is [sequences, H, SUM_GRADS, padded rows], for
    dense and packed calls.
    """
    # The grid is (sequence, head, tile), tiles fastest.
    tiles = tl.cdiv(q_length, BLOCK)
    bh = tl.program_id(0) // tiles
    b = bh // heads
    h = bh % heads
    seq = load_sequence(b, optional, q_length, k_length, CONFIG)
    tile = tl.program_id(0) % tiles
    rows = tile * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    places = row_places(seq.batch, h, seq.first_q + rows, row_stride_b, row_stride_h, row_stride_t)
    factor, constant, slope = row_terms(
        places, rows, rows + seq.n_k - seq.n_q, seq, h, window,
        RowValues(count, row_sum, row_dot, grad_sum, grad_log),
        entropy_wanted(tile * BLOCK, h, b, CONFIG), optional.gamma, numbers, CONFIG.SUM_GRADS,
        CONFIG,
    )  # fmt: skip  # [BLOCK] each
    if CONFIG.GRAD_SCALED:
        # `dkv_kernel` adds the terms to a product with scaled gradients.
        constant *= factor
        slope *= factor
    if CONFIG.POWER > 2:
        slope *= 1.0 / (CONFIG.POWER - 1)
    # Rows past the end are stored too: the table has room for whole blocks.
    padded = padded_rows(q_length)
    targets = terms + bh.to(tl.int64) * (CONFIG.SUM_GRADS * padded) + rows
    tl.store(targets, constant)
    if CONFIG.SUM_GRADS == 2:
        tl.store(targets + padded, slope)


@triton.jit(do_not_specialize=LENGTH_DEPENDENT)
def scale_rows_kernel(
    grad_out,
    scaled,
    out,
    row_dot,
    grad_sum,
    terms,
    count,
    row_sum,
    optional,
    grad_strides,
    scaled_strides,
    out_strides,
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
    """One pass over BLOCK_M rows of the output gradient of one head, without a loop.

    With `SCALE_GRAD`, scaled = grad_out * C_i (with `ROW_NORMALISE` C_i / T_i). With `ROW_DOT`, the
    product dO.O of each row is stored; with `SUM_GRADS` = 1, also the constant that
    `row_terms_kernel` would store. Both tiles [BLOCK_M, DV] are in registers.
    """
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    # The grid is (sequence, head, tile), tiles fastest.
    tiles = tl.cdiv(q_length, BLOCK_M)
    row = tl.program_id(0) % tiles * BLOCK_M
    bh = tl.program_id(0) // tiles
    b = bh // heads
    h = bh % heads
    seq = load_sequence(b, optional, q_length, k_length, CONFIG)
    if CONFIG.PACKED:  # noqa: SIM102 (the outer test is compiled away)
        if row >= seq.n_q:
            return
    limit = seq.first_q + seq.n_q
    rows = row + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    places = row_places(seq.batch, h, seq.first_q + rows, row_stride_b, row_stride_h, row_stride_t)
    g_tile = load_tile(
        grad_out, seq.batch, h, seq.first_q + row, grad_strides, limit,
        BLOCK_M, CONFIG.DV_PAD, CONFIG.DV, False, True,
    ).to(tl.float32)  # fmt: skip  # [BLOCK_M, DV_PAD]
    if CONFIG.SCALE_GRAD or CONFIG.SUM_GRADS == 1:
        factor, constant, _ = row_terms(
            places, rows, rows + seq.n_k - seq.n_q, seq, h, window,
            RowValues(count, row_sum, None, grad_sum, None), True, optional.gamma, numbers,
            CONFIG.SUM_GRADS, CONFIG,
        )  # fmt: skip  # [BLOCK_M] each
    if CONFIG.SCALE_GRAD:
        store_tile(
            scaled, (g_tile * factor[:, None]).to(scaled.dtype.element_ty), seq.batch, h,
            seq.first_q + row, scaled_strides, limit, BLOCK_M, CONFIG.DV_PAD, CONFIG.DV, False,
        )  # fmt: skip
    if CONFIG.ROW_DOT:
        o_tile = load_tile(
            out, seq.batch, h, seq.first_q + row, out_strides, limit,
            BLOCK_M, CONFIG.DV_PAD, CONFIG.DV, False, True,
        ).to(tl.float32)  # fmt: skip  # [BLOCK_M, DV_PAD]
        dot = tl.sum(o_tile * g_tile, 1)  # [BLOCK_M]
        tl.store(row_dot + places, dot, mask=rows < seq.n_q)
        if CONFIG.SUM_GRADS == 1:
            if CONFIG.ROW_NORMALISE:
                constant -= dot
            if CONFIG.GRAD_SCALED:
                constant *= factor
            # Rows past the end are stored too, up to a whole tile.
            tl.store(terms + bh.to(tl.int64) * padded_rows(q_length) + rows, constant)
