"""What the backward kernels need of a row, and passes that bring it: factors, terms, products."""

import triton
import triton.language as tl

from reluformer.ops.backends.triton.portable.device import (
    BLOCK,
    LENGTH_DEPENDENT,
    LN2,
    entropy_wanted,
    load_tile,
    padded_rows,
    row_factor,
    row_places,
    sequence,
    store_tile,
    visible_count,
)


@triton.jit
def row_terms(
    stats,
    rows,
    n_q,
    position,
    end,
    window,
    count,
    grad_sum,
    grad_log,
    row_sum,
    row_dot,
    wanted,
    unit,
    gamma,
    h,
    length_exponent,
    epsilon,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_GAMMA: tl.constexpr,
    DIVIDE: tl.constexpr,
    POWER: tl.constexpr,
    GRADS: tl.constexpr,
):
    """(C_i, constant part of G, coefficient of log2 x in G) for a tile of rows.

    Without their sums of w log w `wanted`, what arrives at those is nothing. With `DIVIDE` the
    first is C_i / T_i and the others are times T_i; `row_dot` is O.dO, and `grad_sum` may be None.
    """
    if HAS_MASK:
        n = tl.load(count + stats, mask=rows < n_q, other=0.0)
    else:
        n = visible_count(position, end, window, CAUSAL, WINDOW)
    factor = row_factor(n, unit, gamma, h, length_exponent, HAS_GAMMA)
    constant = tl.zeros_like(factor)
    slope = tl.zeros_like(factor)
    if GRADS >= 1 and grad_sum is not None:
        constant = tl.load(grad_sum + stats, mask=rows < n_q, other=0.0)
    if GRADS == 2:
        e = tl.load(grad_log + stats, mask=(rows < n_q) & wanted, other=0.0)
        constant += e * (1.0 + LN2 * tl.log2(tl.where(factor > 0, factor, 1.0)))
        slope = e * (POWER * LN2)
    if DIVIDE:
        total = tl.load(row_sum + stats, mask=rows < n_q, other=0.0) + epsilon
        factor /= total
        slope *= total
        if GRADS >= 1:
            constant *= total
            constant -= tl.load(row_dot + stats, mask=rows < n_q, other=0.0)
    return factor, constant, slope


@triton.jit(do_not_specialize=LENGTH_DEPENDENT)
def row_terms_kernel(
    grad_sum,
    grad_log,
    terms,
    count,
    row_sum,
    row_dot,
    gamma,
    lengths,
    cu_q,
    cu_k,
    stride_sb,
    stride_sh,
    stride_st,
    heads,
    q_length,
    k_length,
    window,
    unit,
    length_exponent,
    epsilon,
    POWER: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    VARLEN: tl.constexpr,
    HAS_GAMMA: tl.constexpr,
    DIVIDE: tl.constexpr,
    GRADS: tl.constexpr,
    EVERY: tl.constexpr,
    ROW_SCALE: tl.constexpr,
):
    """The constant and the slope of `row_terms` for every row, times C_i with `ROW_SCALE`.

    Above power 2 the slope is that of log2 x^(p-1), which the loop over queries keeps instead of x.
    `terms` is [sequences, H, GRADS, `padded_rows`], for dense and packed calls alike.
    """
    tiles = tl.cdiv(q_length, BLOCK)
    bh = tl.program_id(0) // tiles
    b = bh // heads
    h = bh % heads
    batch, first_q, first_k, n_q, n_k, end = sequence(
        b, cu_q, cu_k, lengths, q_length, k_length, VARLEN, HAS_LENGTHS
    )
    tile = tl.program_id(0) % tiles
    rows = tile * BLOCK + tl.arange(0, BLOCK)
    stats = row_places(batch, h, first_q + rows, stride_sb, stride_sh, stride_st)
    factor, constant, slope = row_terms(
        stats, rows, n_q, rows + n_k - n_q, end, window, count, grad_sum, grad_log,
        row_sum, row_dot, entropy_wanted(tile * BLOCK, h, b, EVERY), unit, gamma, h,
        length_exponent, epsilon, CAUSAL, WINDOW, HAS_MASK, HAS_GAMMA, DIVIDE, POWER, GRADS,
    )  # fmt: skip
    if ROW_SCALE:
        constant *= factor
        slope *= factor
    if POWER > 2:
        slope *= 1.0 / (POWER - 1)
    padded = padded_rows(q_length)
    places = terms + bh.to(tl.int64) * (GRADS * padded) + rows
    tl.store(places, constant)
    if GRADS == 2:
        tl.store(places + padded, slope)


@triton.jit(do_not_specialize=LENGTH_DEPENDENT)
def scale_rows_kernel(
    grad_out,
    scaled,
    out,
    row_dot,
    count,
    row_sum,
    gamma,
    lengths,
    cu_q,
    cu_k,
    stride_gb,
    stride_gh,
    stride_gt,
    stride_db,
    stride_dh,
    stride_dt,
    stride_ob,
    stride_oh,
    stride_ot,
    stride_sb,
    stride_sh,
    stride_st,
    heads,
    q_length,
    k_length,
    window,
    unit,
    length_exponent,
    epsilon,
    ROWS: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    VARLEN: tl.constexpr,
    HAS_GAMMA: tl.constexpr,
    DIVIDE: tl.constexpr,
    COPY: tl.constexpr,
    ROW_DOT: tl.constexpr,
):
    """With `COPY` scaled = grad_out times C_i (`DIVIDE`: C_i / T_i); with `ROW_DOT` out.grad_out
    per row."""
    tiles = tl.cdiv(q_length, ROWS)
    row = tl.program_id(0) % tiles * ROWS
    bh = tl.program_id(0) // tiles
    b = bh // heads
    h = bh % heads
    batch, first_q, first_k, n_q, n_k, end = sequence(
        b, cu_q, cu_k, lengths, q_length, k_length, VARLEN, HAS_LENGTHS
    )
    if VARLEN:  # noqa: SIM102 (the outer test is compiled away)
        if row >= n_q:
            return
    rows = row + tl.arange(0, ROWS)
    stats = row_places(batch, h, first_q + rows, stride_sb, stride_sh, stride_st)
    g_tile = load_tile(
        grad_out, batch, h, first_q + row, stride_gb, stride_gh, stride_gt, first_q + n_q,
        ROWS, DV_PAD, DV, False, True,
    ).to(tl.float32)  # fmt: skip
    if COPY:
        factor, _, _ = row_terms(
            stats, rows, n_q, rows + n_k - n_q, end, window, count, count, count, row_sum,
            count, True, unit, gamma, h, length_exponent, epsilon,
            CAUSAL, WINDOW, HAS_MASK, HAS_GAMMA, DIVIDE, 1, 0,
        )  # fmt: skip
        store_tile(
            scaled, (g_tile * factor[:, None]).to(scaled.dtype.element_ty), batch, h,
            first_q + row, stride_db, stride_dh, stride_dt, first_q + n_q, ROWS, DV_PAD, DV, False,
        )  # fmt: skip
    if ROW_DOT:
        o_tile = load_tile(
            out, batch, h, first_q + row, stride_ob, stride_oh, stride_ot, first_q + n_q,
            ROWS, DV_PAD, DV, False, True,
        ).to(tl.float32)  # fmt: skip
        tl.store(row_dot + stats, tl.sum(o_tile * g_tile, 1), mask=rows < n_q)
