"""Loops of the dK/dV kernel over query tiles, and their state.

`backward_dkv.py` describes the kernel. An iteration starts products before the arithmetic that they
run beside, and `end_block` keeps the arithmetic before the wait for them.
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
    relu_powers,
    score_gradients,
    store_signs,
)
from reluformer.ops.backends.triton.hopper.device import advance, end_block, shift_scores
from reluformer.ops.backends.triton.hopper.stored_gradients import PAIRS, store_gradients


class KeyTile(NamedTuple):
    """The keys of a consumer in one step, and the query tiles that see them."""

    batch: Any
    head: Any
    """Key head."""
    key: Any
    """First key."""
    end: Any
    """Number of keys that exist."""
    offset: Any
    """n_k - n_q: with causality, query i sees the keys up to i + offset."""
    first: Any
    """First query tile that the producer loads for both consumers."""
    low: Any
    """First query tile that this consumer needs."""
    unmasked: Any
    """First query tile that sees all keys of this consumer."""
    high: Any
    """End of the query tiles."""


class QueryLoopState(NamedTuple):
    """State of a consumer that one query tile leaves to the next."""

    dk: Any
    """[ROWS, D]."""
    dv: Any
    """[ROWS, D]."""
    dp: Any
    """Registers of S^T and dP^T, [ROWS, COLS]; with SEPARATE_SCORES dP^T of the last query tile."""
    p: Any
    """Pairs of the weights of the last query tile, [ROWS, COLS / 2]."""
    ds: Any
    """Pairs of its score gradients, [ROWS, COLS / 2]; with SEPARATE_SCORES a PendingGradients."""
    held: Any
    """Stage of its Q and dO, which the next iteration still reads."""
    ring: Any
    """Position of the next query tile."""


class PendingGradients(NamedTuple):
    """With SEPARATE_SCORES: values for the score gradients of the last query tile."""

    relu_pow_minus_1: Any
    """Pairs from `relu_powers`, [ROWS, COLS / 2]."""
    row_terms: Any
    """[COLS], or 0."""
    s: Any
    """Registers of S^T, [ROWS, COLS]."""
    block: Any
    """Pointer to the block where they are stored, or 0."""


@gluon.jit
def weights(s, key_tile, query, threshold, scale, MASKED: gl.constexpr, CONFIG: gl.constexpr):
    """`relu_powers` of scores s [keys, queries from `query` on], 0 where a key is not visible."""
    layout: gl.constexpr = s.type.layout
    s = shift_scores(s, threshold, scale, CONFIG)  # [ROWS, COLS]
    if MASKED:
        first = key_tile.key - key_tile.offset
        keys = first + gl.arange(0, s.shape[0], gl.SliceLayout(1, layout))
        queries = query + gl.arange(0, s.shape[1], gl.SliceLayout(0, layout))
        s = gl.where(keys[:, None] <= queries[None, :], s, 0.0)
    return relu_powers(s, CONFIG.POWER)


@gluon.jit
def load_terms(terms, like, CONFIG: gl.constexpr):
    """Row terms [COLS] of a query tile from the pointer `terms` on, or 0; `like` [ROWS, COLS]."""
    layout: gl.constexpr = like.type.layout
    values = 0.0
    if CONFIG.ROW_TERMS:
        values = gl.load(terms + gl.arange(0, like.shape[1], gl.SliceLayout(0, layout)))
    return values


@gluon.jit
def add_row_terms(dp, row_terms, CONFIG: gl.constexpr):
    """dP^T [keys, queries] plus the terms of the queries."""
    if CONFIG.ROW_TERMS:
        dp = dp + row_terms[None, :]
    return dp


@gluon.jit
def query_loop(
    state, k_tile, v_tile, shared, key_tile, member, start, stop, terms, blocks, threshold, scale,
    sizes, MASKED: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Query tiles [start, stop) of one query head: the state, `terms` and `blocks` after them.

    S^T and dP^T share registers. dK of the previous tile runs beside the weights, dV beside dS^T.

    Args:
        member: number of the query head in its group.
        terms: pointer to the row terms of query tile `start`.
        blocks: pointer to the block of query tile `start`, of signs or score gradients.
    """
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    _k_bufs, _v_bufs, q_bufs, g_bufs = shared.buffers
    dk, dv, dp, p, ds, held, ring = state
    for t in range(start, stop):
        # dK is of the previous query tile; the first of all does not add to anything.
        adds = member * (key_tile.high - key_tile.low) + t > key_tile.low + 1
        mbarrier.wait(shared.full.index(ring.stage), ring.phase)
        q_t = streamed_tile(q_bufs, ring.stage, CONFIG).permute((1, 0))
        s = warpgroup_mma(k_tile, q_t, dp, use_acc=False, is_async=True)  # [ROWS, COLS]
        ds_operand = as_left_operand(ds, p_layout)
        q_held = streamed_tile(q_bufs, held, CONFIG)
        dk = warpgroup_mma(ds_operand, q_held, dk, use_acc=adds, is_async=True)  # [ROWS, D]
        s = warpgroup_mma_wait(1, [s])
        p, relu_pow_minus_1 = weights(
            s, key_tile, t * CONFIG.COLS, threshold, scale, MASKED, CONFIG
        )
        if CONFIG.POWER > 1:
            end_block(held)
        g_tile = streamed_tile(g_bufs, ring.stage, CONFIG)
        dp = warpgroup_mma(v_tile, g_tile.permute((1, 0)), s, use_acc=False, is_async=True)
        p_operand = as_left_operand(p, p_layout)  # [ROWS, COLS]
        dv = warpgroup_mma(p_operand, g_tile, dv, is_async=True)  # [ROWS, D]
        if CONFIG.SIGNS:
            store_signs(p, blocks, key_tile.key < sizes.n_k)
            blocks += sizes.key_blocks * 256
        # Loading takes longer than computing the gradients.
        row_terms = load_terms(terms, s, CONFIG)
        # Only dV stays in flight.
        dp, dk = warpgroup_mma_wait(1, [dp, dk])
        ds = score_gradients(add_row_terms(dp, row_terms, CONFIG), relu_pow_minus_1, CONFIG.POWER)
        if CONFIG.ROW_TERMS:
            terms += CONFIG.COLS
        if CONFIG.GRADIENTS:
            # Before the wait for dV, so that the stores leave beside it.
            store_gradients(ds, blocks, key_tile.key < key_tile.end)
            blocks += PAIRS
        end_block(ring.stage)
        dv = warpgroup_mma_wait(0, [dv])
        mbarrier.arrive(shared.empty.index(held), count=1)
        held = ring.stage
        ring = advance(ring, CONFIG.STAGES)
    return QueryLoopState(dk, dv, dp, p, ds, held, ring), terms, blocks


@gluon.jit
def query_loop_separate(
    state, k_tile, v_tile, shared, key_tile, member, start, stop, terms, blocks, threshold, scale,
    sizes, MASKED: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """As `query_loop`, with registers of their own for S^T and dP^T.

    dV and S^T run beside dS^T of the previous tile, dK and dP^T beside the weights.
    """
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    _k_bufs, _v_bufs, q_bufs, g_bufs = shared.buffers
    dk, dv, dp, p, pending, held, ring = state
    relu_pow_minus_1, row_terms, s, block = pending
    for t in range(start, stop):
        # dV and dK are of the previous query tile; the first of all does not add to anything.
        adds = member * (key_tile.high - key_tile.low) + t > key_tile.low + 1
        mbarrier.wait(shared.full.index(ring.stage), ring.phase)
        g_held = streamed_tile(g_bufs, held, CONFIG)
        p_operand = as_left_operand(p, p_layout)  # [ROWS, COLS]
        dv = warpgroup_mma(p_operand, g_held, dv, use_acc=adds, is_async=True)  # [ROWS, D]
        q_t = streamed_tile(q_bufs, ring.stage, CONFIG).permute((1, 0))
        s = warpgroup_mma(k_tile, q_t, s, use_acc=False, is_async=True)  # [ROWS, COLS]
        end_block(held)
        grad = add_row_terms(dp, row_terms, CONFIG)
        ds = score_gradients(grad, relu_pow_minus_1, CONFIG.POWER)
        if CONFIG.GRADIENTS:
            # These are of the previous query tile, and `blocks` is the place of this one.
            store_gradients(ds, block, key_tile.key < key_tile.end)
            block = blocks
            blocks += PAIRS
        q_held = streamed_tile(q_bufs, held, CONFIG)
        dk = warpgroup_mma(
            as_left_operand(ds, p_layout), q_held, dk, use_acc=adds, is_async=True
        )  # [ROWS, D]
        g_t = streamed_tile(g_bufs, ring.stage, CONFIG).permute((1, 0))
        dp = warpgroup_mma(v_tile, g_t, dp, use_acc=False, is_async=True)  # [ROWS, COLS]
        # dK and dP stay in flight.
        s, dv = warpgroup_mma_wait(2, [s, dv])
        row_terms = load_terms(terms, s, CONFIG)
        if CONFIG.ROW_TERMS:
            terms += CONFIG.COLS
        p, relu_pow_minus_1 = weights(
            s, key_tile, t * CONFIG.COLS, threshold, scale, MASKED, CONFIG
        )
        end_block(ring.stage)
        dp, dk = warpgroup_mma_wait(0, [dp, dk])
        mbarrier.arrive(shared.empty.index(held), count=1)
        held = ring.stage
        ring = advance(ring, CONFIG.STAGES)
    pending = PendingGradients(relu_pow_minus_1, row_terms, s, block)
    return QueryLoopState(dk, dv, dp, p, pending, held, ring), terms, blocks
