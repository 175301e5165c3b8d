"""Loops of the dQ kernel over key tiles, and their state.

`backward_dq.py` describes the kernel. Above power 1 there is more arithmetic for each product, and
`power_loop` starts products before the arithmetic that they run beside.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from reluformer.ops.backends.triton.hopper.backward_device import streamed_tile
from reluformer.ops.backends.triton.hopper.bf16_pairs import (
    as_left_operand,
    gate_by_signs,
    partial_pair_sums,
    relu_powers,
    score_gradients,
)
from reluformer.ops.backends.triton.hopper.device import (
    advance,
    end_block,
    mask_keys,
    shift_scores,
)


class DqLoopState(NamedTuple):
    """State of a consumer that one key tile leaves to the next."""

    ring: Any
    """Position of the next key tile."""
    s: Any
    """Registers of S, [ROWS, COLS]."""
    dp: Any
    """Registers of dP, [ROWS, COLS]; above power 1, dP of the last key tile."""
    acc: Any
    """dQ so far, [ROWS, D]."""
    words: Any
    """Sign words of the next key tile, or 0."""
    blocks: Any
    """Pointers to these words, or 0."""
    ds: Any
    """Pairs of the last key tile, [ROWS, COLS / 2]: score gradients, or slopes above power 1."""
    row_shift: Any
    """Partial sums of dS, [ROWS, 4], or 0; above power 1, without the last key tile."""
    held: Any
    """Stage of the last key tile, whose K dQ still needs."""


@gluon.jit
def tile_gradients(
    s, dp, words, row_terms, bounds, col, threshold, scale, MASKED: gl.constexpr,
    MASK_TAIL: gl.constexpr, IN_FLIGHT: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """(pairs of dS, s, dp) of one key tile at power 1, after waiting for the products s and dp.

    Args:
        s, dp: products in flight, [ROWS, COLS]; s was started just before dp.
        words: sign words of the tile, with SIGNS.
        row_terms: [ROWS], with ROW_TERMS.
        MASKED: whether `bounds` are applied, with MASK_TAIL and SIGNS to dP too.
        IN_FLIGHT: number of products started after dp.
    """
    if not CONFIG.SIGNS:
        s = warpgroup_mma_wait(IN_FLIGHT + 1, [s])
        score = shift_scores(s, threshold, scale, CONFIG)  # [ROWS, COLS]
        if MASKED:
            score = mask_keys(score, bounds, col, CONFIG.CAUSAL)
        p, _ = relu_powers(score, 1)
    dp = warpgroup_mma_wait(IN_FLIGHT, [dp])
    grad = dp  # [ROWS, COLS]
    if CONFIG.ROW_TERMS:
        grad = grad + row_terms[:, None]
    if MASKED and MASK_TAIL and CONFIG.SIGNS:
        # Padding may hold NaN, and its sign bits are not written.
        grad = mask_keys(grad, bounds, col, False)
    ds = gate_by_signs(grad, words) if CONFIG.SIGNS else score_gradients(grad, p, 1)
    return ds, s, dp


@gluon.jit
def key_loop(
    state, q_tile, g_tile, shared, low, high, row_terms, bounds, threshold, scale,
    ROW_SHIFT: gl.constexpr, MASKED: gl.constexpr, MASK_TAIL: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Power 1: dS of key tiles [low, high), and dQ += dS K of the tiles one before."""
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    _q_bufs, _g_bufs, k_bufs, v_bufs = shared.buffers
    ring, s, dp, acc, words, blocks, ds, row_shift, held = state
    for j in range(low, high):
        mbarrier.wait(shared.full.index(ring.stage), ring.phase)
        if not CONFIG.SIGNS:
            k_t = streamed_tile(k_bufs, ring.stage, CONFIG).permute((1, 0))
            s = warpgroup_mma(q_tile, k_t, s, use_acc=False, is_async=True)  # [ROWS, COLS]
        v_t = streamed_tile(v_bufs, ring.stage, CONFIG).permute((1, 0))
        dp = warpgroup_mma(g_tile, v_t, dp, use_acc=False, is_async=True)  # [ROWS, COLS]
        adds = j > 1
        ds_operand = as_left_operand(ds, p_layout)
        k_held = streamed_tile(k_bufs, held, CONFIG)
        acc = warpgroup_mma(ds_operand, k_held, acc, use_acc=adds, is_async=True)  # [ROWS, D]
        if CONFIG.SIGNS:
            # Signs of the next tile: loading them takes longer than the products of an iteration.
            blocks += 128
            next_words = gl.load(blocks)
        ds, s, dp = tile_gradients(
            s, dp, words, row_terms, bounds, j * CONFIG.COLS, threshold, scale, MASKED, MASK_TAIL,
            1, CONFIG,
        )  # fmt: skip
        if CONFIG.SIGNS:
            words = next_words
        if ROW_SHIFT:
            row_shift += partial_pair_sums(ds)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(shared.empty.index(held), count=1)
        held = ring.stage
        ring = advance(ring, CONFIG.STAGES)
    return DqLoopState(ring, s, dp, acc, words, blocks, ds, row_shift, held)


@gluon.jit
def slopes(s, bounds, col, threshold, scale, MASKED: gl.constexpr, CONFIG: gl.constexpr):
    """Pairs of max(score, 0)^(p - 1) of the products s [ROWS, COLS] with the keys from `col` on."""
    score = shift_scores(s, threshold, scale, CONFIG)
    if MASKED:
        score = mask_keys(score, bounds, col, CONFIG.CAUSAL)
    _, relu_pow_minus_1 = relu_powers(score, CONFIG.POWER)
    return relu_pow_minus_1


@gluon.jit
def late_gradients(dp, slope, row_terms, CONFIG: gl.constexpr):
    """Pairs of dS = (dP + row terms) * slope, [ROWS, COLS / 2]."""
    if CONFIG.ROW_TERMS:
        dp = dp + row_terms[:, None]
    return score_gradients(dp, slope, CONFIG.POWER)


@gluon.jit
def power_loop(
    state, q_tile, g_tile, shared, low, high, row_terms, bounds, threshold, scale,
    ROW_SHIFT: gl.constexpr, MASKED: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Powers above 1: dP and slopes of key tiles [low, high), dS and dQ of the tiles one before.

    S runs beside dS of the previous tile, dP and dQ beside the slopes.
    """
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    _q_bufs, _g_bufs, k_bufs, v_bufs = shared.buffers
    ring, s, dp, acc, words, blocks, slope, row_shift, held = state
    for j in range(low, high):
        mbarrier.wait(shared.full.index(ring.stage), ring.phase)
        k_t = streamed_tile(k_bufs, ring.stage, CONFIG).permute((1, 0))
        s = warpgroup_mma(q_tile, k_t, s, use_acc=False, is_async=True)  # [ROWS, COLS]
        end_block(held)
        ds = late_gradients(dp, slope, row_terms, CONFIG)  # [ROWS, COLS / 2]
        v_t = streamed_tile(v_bufs, ring.stage, CONFIG).permute((1, 0))
        dp = warpgroup_mma(g_tile, v_t, dp, use_acc=False, is_async=True)  # [ROWS, COLS]
        acc = warpgroup_mma(
            as_left_operand(ds, p_layout), streamed_tile(k_bufs, held, CONFIG), acc, use_acc=j > 1,
            is_async=True,
        )  # fmt: skip  # [ROWS, D]
        s = warpgroup_mma_wait(2, [s])
        slope = slopes(s, bounds, j * CONFIG.COLS, threshold, scale, MASKED, CONFIG)
        if ROW_SHIFT:
            row_shift += partial_pair_sums(ds)
        end_block(ring.stage)
        dp, acc = warpgroup_mma_wait(0, [dp, acc])
        mbarrier.arrive(shared.empty.index(held), count=1)
        held = ring.stage
        ring = advance(ring, CONFIG.STAGES)
    return DqLoopState(ring, s, dp, acc, words, blocks, slope, row_shift, held)
