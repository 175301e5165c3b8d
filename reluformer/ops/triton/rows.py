"""Passes over rows that come before the backward kernels: their factors, terms and products."""

import triton
import triton.language as tl

from reluformer.ops.triton.backward import row_terms
from reluformer.ops.triton.parts import (
    BLOCK,
    LENGTH_DEPENDENT,
    entropy_wanted,
    load_tile,
    padded_rows,
    sequence,
    store_tile,
)


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
    stats = (
        batch.to(tl.int64) * stride_sb
        + h.to(tl.int64) * stride_sh
        + (first_q + rows).to(tl.int64) * stride_st
    )
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
    stats = (
        batch.to(tl.int64) * stride_sb
        + h.to(tl.int64) * stride_sh
        + (first_q + rows).to(tl.int64) * stride_st
    )
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
