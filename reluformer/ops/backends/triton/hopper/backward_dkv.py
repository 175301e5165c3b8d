"""Warp-specialised kernel for the gradients of keys and values, for Hopper.

It computes what `portable/backward_dkv.py` computes. `backward_device.py` describes the partitions
of warps, shared memory and barriers, which are those of `backward_dq.py` too.

A CTA owns tiles of 2 * ROWS keys of one key head: K and V are resident. For each tile it loops over
the query heads of the group and, for each, over the query tiles that see the keys: Q and dO are
streamed. Everything is transposed, keys by queries:

    S^T = K Q^T    dP^T = V dO^T    dV += P^T dO    dK += dS^T Q

Two loops, in `backward_dkv_loops.py`:

    shared registers    starts S^T of this query tile and dK of the previous one, computes the
                        weights, starts dP^T and dV, computes dS^T
    SEPARATE_SCORES     starts dV of the previous query tile and S^T of this one, computes dS^T of
                        the previous one, starts its dK and dP^T of this one, computes the weights

The second has a product beside all of its arithmetic, and 32 registers more: width 64 only. With
GRADIENTS both store dS^T for `backward_dq_product.py`.

Registers of a consumer: S^T and dP^T [ROWS, COLS] in float32, in the same registers without
SEPARATE_SCORES, dK and dV [ROWS, D] in float32, pairs of P^T and dS^T (`bf16_pairs.py`), and K and
V [ROWS, D] with IN_REGISTERS.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from reluformer.ops.backends.triton.hopper.backward_device import (
    BackwardShared,
    BackwardSizes,
    allocate_barriers,
    backward_producer,
    gradient_factors,
    query_tile_range,
    release_unread,
    resident_tile,
    streamed_tile,
)
from reluformer.ops.backends.triton.hopper.backward_dkv_loops import (
    KeyTile,
    PendingGradients,
    QueryLoopState,
    add_row_terms,
    load_terms,
    query_loop,
    query_loop_separate,
    weights,
)
from reluformer.ops.backends.triton.hopper.bf16_pairs import (
    as_left_operand,
    score_gradients,
    store_signs,
)
from reluformer.ops.backends.triton.hopper.device import (
    Ring,
    advance,
    key_end,
    opaque,
    release_loaded,
    scaled_threshold,
    store_tile,
    tile_coordinates,
    tile_count,
)
from reluformer.ops.backends.triton.hopper.stored_gradients import gradient_block, store_gradients
from reluformer.ops.backends.triton.versions import thread_barrier


@gluon.jit
def _stored_block(stored, head, tile, key, sizes, CONFIG: gl.constexpr):
    """Pointer to the block of a query tile of query head `head` and the keys from `key`, or 0.

    Its signs or its score gradients are stored there.
    """
    place = 0
    if CONFIG.SIGNS:
        block = head.to(gl.int64) * sizes.head_blocks + tile.to(gl.int64) * sizes.key_blocks
        place = stored + (block + key // 64) * 256
    if CONFIG.GRADIENTS:
        place = gradient_block(stored, head, tile, key, sizes, CONFIG.COMPACT)
    return place


@gluon.jit
def _start_scores(k_tile, shared, ring, dp, CONFIG: gl.constexpr):
    """Wait for a query tile and start S^T = K Q^T [ROWS, COLS] in the registers of dp."""
    _k_bufs, _v_bufs, q_bufs, _g_bufs = shared.buffers
    mbarrier.wait(shared.full.index(ring.stage), ring.phase)
    q_t = streamed_tile(q_bufs, ring.stage, CONFIG).permute((1, 0))
    return warpgroup_mma(k_tile, q_t, dp, use_acc=False, is_async=True)


@gluon.jit
def _locate_tile(step, offset, lengths, sizes, consumer: gl.constexpr, CONFIG: gl.constexpr):
    """The KeyTile of a consumer in step number `step` of this CTA."""
    batch, head, tile = tile_coordinates(step, sizes, CONFIG.CAUSAL)
    TILE_ROWS: gl.constexpr = CONFIG.CONSUMERS * CONFIG.ROWS
    base = tile * TILE_ROWS
    key = base + consumer * CONFIG.ROWS
    end = key_end(lengths, batch, sizes.n_k)
    first, high, _ = query_tile_range(base, base, end, sizes, TILE_ROWS, CONFIG)
    low, high, unmasked = query_tile_range(base, key, end, sizes, CONFIG.ROWS, CONFIG)
    unmasked = gl.minimum(gl.maximum(unmasked, low), high)
    return KeyTile(batch, head, key, end, offset, first, low, unmasked, high)


@gluon.jit
def _first_query_tile(
    s, dv, v_tile, shared, ring, key_tile, query_head, threshold, scale, pointers, sizes,
    CONFIG: gl.constexpr,
):  # fmt: skip
    """(dV, dP^T, P^T, dS^T) of the first query tile, from its scores s, as in QueryLoopState.

    dV is the sum with the first query tile, except with SEPARATE_SCORES.
    """
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    _k_bufs, _v_bufs, _q_bufs, g_bufs = shared.buffers
    low = key_tile.low
    p, relu_pow_minus_1 = weights(
        s, key_tile, low * CONFIG.COLS, threshold, scale, CONFIG.CAUSAL, CONFIG
    )  # [ROWS, COLS / 2]
    g_t = streamed_tile(g_bufs, ring.stage, CONFIG).permute((1, 0))
    # The registers of dP^T: those of S^T, whose scores have been read, or others.
    scores = s
    if CONFIG.SEPARATE_SCORES:
        s_layout: gl.constexpr = s.type.layout
        scores = gl.zeros([CONFIG.ROWS, CONFIG.COLS], gl.float32, s_layout)
    dp = warpgroup_mma(v_tile, g_t, scores, use_acc=False, is_async=True)  # [ROWS, COLS]
    if not CONFIG.SEPARATE_SCORES:
        # dV starts with this tile: nothing is added to it.
        g_tile = streamed_tile(g_bufs, ring.stage, CONFIG)
        dv = warpgroup_mma(as_left_operand(p, p_layout), g_tile, dv, use_acc=False, is_async=True)
    block = _stored_block(pointers.stored, query_head, low, key_tile.key, sizes, CONFIG)
    if CONFIG.SIGNS:
        # There are no blocks past the last key.
        store_signs(p, block, key_tile.key < sizes.n_k)
    terms = 0
    if CONFIG.ROW_TERMS:
        terms = pointers.terms + (query_head.to(gl.int64) * sizes.term_rows + low * CONFIG.COLS)
    row_terms = load_terms(terms, s, CONFIG)
    if CONFIG.SEPARATE_SCORES:
        dp = warpgroup_mma_wait(0, [dp])
        ds = PendingGradients(relu_pow_minus_1, row_terms, s, block)
    else:
        dp, dv = warpgroup_mma_wait(0, [dp, dv])
        ds = score_gradients(add_row_terms(dp, row_terms, CONFIG), relu_pow_minus_1, CONFIG.POWER)
        if CONFIG.GRADIENTS:
            # Blocks of keys that no row sees are not stored: dQ does not read them.
            store_gradients(ds, block, key_tile.key < key_tile.end)
    return dv, dp, p, ds


@gluon.jit
def _query_heads(
    state, k_tile, v_tile, shared, key_tile, resident_phase, threshold, pointers, sizes, scalars,
    consumer: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """All query tiles but the first, of all query heads of the group: the state after them."""
    GROUP: gl.constexpr = CONFIG.GROUP
    k_bufs, v_bufs, _q_bufs, _g_bufs = shared.buffers
    batch, head, key, _end, _offset, first, low, unmasked, high = key_tile
    for member in range(0, GROUP):
        query_head = (batch * sizes.heads + head) * GROUP + member
        dk, dv, dp, p, ds, held, ring = state
        if GROUP > 1:
            threshold = scaled_threshold(
                pointers.threshold, scalars, head * GROUP + member, CONFIG.SCALE_SCORES
            )
            if CONFIG.CAUSAL:
                # The tiles of each head start with those that only the other consumer needs.
                unread = gl.where(member > 0, low - first, 0)
                ring = release_unread(shared, ring, unread, CONFIG.STAGES)
        state = QueryLoopState(dk, dv, dp, p, ds, held, ring)
        start = gl.where(member > 0, low, low + 1)
        # These pointers advance in the loop: computed from a tile's number, they would make the
        # number and the masks 64 bits wide.
        terms = 0
        if CONFIG.ROW_TERMS:
            terms = pointers.terms + (
                query_head.to(gl.int64) * sizes.term_rows + start * CONFIG.COLS
            )
        blocks = _stored_block(pointers.stored, query_head, start, key, sizes, CONFIG)
        # With causality a loop over masked tiles, then one over unmasked tiles.
        for loop in gl.static_range(2 if CONFIG.CAUSAL else 1):
            stop = unmasked if CONFIG.CAUSAL and loop == 0 else high
            if CONFIG.CAUSAL and not CONFIG.IN_REGISTERS:
                # See `opaque`. It costs time, so the short masked loop gets it.
                place = opaque(resident_phase * 0 + consumer) if loop == 0 else consumer
                k_tile = resident_tile(k_bufs, place, False, CONFIG)
                v_tile = resident_tile(v_bufs, place, False, CONFIG)
            if CONFIG.SEPARATE_SCORES:
                state, terms, blocks = query_loop_separate(
                    state, k_tile, v_tile, shared, key_tile, member, start, stop, terms, blocks,
                    threshold, scalars.scale, sizes, CONFIG.CAUSAL and loop == 0, CONFIG,
                )  # fmt: skip
            else:
                state, terms, blocks = query_loop(
                    state, k_tile, v_tile, shared, key_tile, member, start, stop, terms, blocks,
                    threshold, scalars.scale, sizes, CONFIG.CAUSAL and loop == 0, CONFIG,
                )  # fmt: skip
            start = gl.maximum(start, unmasked)
    return state


@gluon.jit
def _write_tile(
    dk_acc, dv_acc, dk, dv, key_tile, pointers, shared, scalars, consumer: gl.constexpr,
    CONFIG: gl.constexpr,
):  # fmt: skip
    """Scale and store dK and dV [ROWS, D] of a consumer."""
    batch, head, key, end, _offset, _first, _low, _unmasked, _high = key_tile
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.D, 16])
    factor, slope = gradient_factors(end, pointers.gamma, head * CONFIG.GROUP, scalars, CONFIG)
    values = dv_acc * factor  # [ROWS, D]
    keys = dk_acc * slope
    if pointers.lengths is not None:
        # Padding may hold NaN. No query sees it, so its gradient is 0.
        rows = key + gl.arange(0, CONFIG.ROWS, gl.SliceLayout(1, o_layout))
        values = gl.where((rows < end)[:, None], values, 0.0)
        keys = gl.where((rows < end)[:, None], keys, 0.0)
    store_tile(values, dv, shared.out.index(consumer), batch, head, key)
    store_tile(keys, dk, shared.out.index(consumer), batch, head, key)


@gluon.jit
def _consumer(
    dk, dv, pointers, shared, sizes, scalars, consumer: gl.constexpr, CONFIG: gl.constexpr
):
    """Compute dK and dV of keys [consumer * ROWS, (consumer + 1) * ROWS) of every tile."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.COLS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    k_bufs, v_bufs, q_bufs, g_bufs = shared.buffers
    offset = sizes.n_k - sizes.n_q
    steps = tile_count(sizes.items, CONFIG.CAUSAL)
    resident_phase = 0
    ring = Ring(0, 0)
    dp = gl.zeros([CONFIG.ROWS, CONFIG.COLS], gl.float32, s_layout)
    dk_acc = gl.zeros([CONFIG.ROWS, CONFIG.D], gl.float32, o_layout)
    dv_acc = gl.zeros([CONFIG.ROWS, CONFIG.D], gl.float32, o_layout)

    next_tile = _locate_tile(0, offset, pointers.lengths, sizes, consumer, CONFIG)
    if CONFIG.CAUSAL:
        ring = release_unread(shared, ring, next_tile.low - next_tile.first, CONFIG.STAGES)
    mbarrier.wait(shared.resident_full.index(consumer), 0)
    k_tile = resident_tile(k_bufs, consumer, CONFIG.IN_REGISTERS, CONFIG)  # [ROWS, D]
    s = _start_scores(k_tile, shared, ring, dp, CONFIG)
    s = warpgroup_mma_wait(0, [s])
    for step in range(0, steps):
        key_tile = _locate_tile(step, offset, pointers.lengths, sizes, consumer, CONFIG)
        has_more = CONFIG.GROUP * (key_tile.high - key_tile.low) > 1
        query_head = (key_tile.batch * sizes.heads + key_tile.head) * CONFIG.GROUP
        threshold = scaled_threshold(
            pointers.threshold, scalars, key_tile.head * CONFIG.GROUP, CONFIG.SCALE_SCORES
        )
        v_tile = resident_tile(v_bufs, consumer, CONFIG.IN_REGISTERS, CONFIG)  # [ROWS, D]
        if CONFIG.IN_REGISTERS:
            release_loaded(shared.resident_empty.index(consumer))
        dv_acc, dp, p, ds = _first_query_tile(
            s, dv_acc, v_tile, shared, ring, key_tile, query_head, threshold, scalars.scale,
            pointers, sizes, CONFIG,
        )  # fmt: skip
        held = ring.stage
        ring = advance(ring, CONFIG.STAGES)
        state = QueryLoopState(dk_acc, dv_acc, dp, p, ds, held, ring)
        state = _query_heads(
            state, k_tile, v_tile, shared, key_tile, resident_phase, threshold, pointers, sizes,
            scalars, consumer, CONFIG,
        )  # fmt: skip
        dk_acc, dv_acc, dp, p, ds, held, ring = state
        if not CONFIG.IN_REGISTERS:
            mbarrier.arrive(shared.resident_empty.index(consumer), count=1)
        resident_phase ^= 1

        # dK of the last query tile and, with SEPARATE_SCORES, its dV and dS^T.
        if CONFIG.SEPARATE_SCORES:
            dv_acc = warpgroup_mma(
                as_left_operand(p, p_layout), streamed_tile(g_bufs, held, CONFIG), dv_acc,
                use_acc=has_more, is_async=True,
            )  # fmt: skip
            relu_pow_minus_1, row_terms, s, block = ds
            grad = add_row_terms(dp, row_terms, CONFIG)
            ds = score_gradients(grad, relu_pow_minus_1, CONFIG.POWER)
            if CONFIG.GRADIENTS:
                store_gradients(ds, block, key_tile.key < key_tile.end)
        dk_acc = warpgroup_mma(
            as_left_operand(ds, p_layout), streamed_tile(q_bufs, held, CONFIG), dk_acc,
            use_acc=has_more, is_async=True,
        )  # fmt: skip
        dv_acc, dk_acc = warpgroup_mma_wait(0, [dv_acc, dk_acc])  # [ROWS, D]
        mbarrier.arrive(shared.empty.index(held), count=1)

        # Start the first scores of the next step, then write this one's gradients.
        if CONFIG.CAUSAL:
            next_tile = _locate_tile(step + 1, offset, pointers.lengths, sizes, consumer, CONFIG)
            unread = gl.where(step + 1 < steps, next_tile.low - next_tile.first, 0)
            ring = release_unread(shared, ring, unread, CONFIG.STAGES)
        mbarrier.wait(shared.resident_full.index(consumer), resident_phase)
        k_tile = resident_tile(k_bufs, consumer, CONFIG.IN_REGISTERS, CONFIG)
        s = _start_scores(k_tile, shared, ring, dp, CONFIG)
        _write_tile(dk_acc, dv_acc, dk, dv, key_tile, pointers, shared, scalars, consumer, CONFIG)
        s = warpgroup_mma_wait(0, [s])
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["items", "heads", "tiles", "n_q", "n_k", "key_blocks", "head_blocks"])
def hopper_dkv_kernel(
    q, k, v, grad_out, dk, dv, pointers, items, heads, tiles, n_q, n_k, key_blocks, head_blocks,
    term_rows, scalars, CONFIG: gl.constexpr,
):  # fmt: skip
    """dK and dV [B, Hkv, Tk, D], summed over the query heads of a group.

    Args:
        q, k, v, grad_out, dk, dv: TMA descriptors of [B, H, T, D], with tiles of 64 rows.
        pointers: a BackwardPointers.
        items .. term_rows: the fields of BackwardSizes; `heads` are key heads.
        scalars: a Scalars.
        CONFIG: a BackwardConfig of constexprs.
    """
    resident_shape: gl.constexpr = [CONFIG.CONSUMERS, 1, 1, CONFIG.ROWS, CONFIG.D]
    streamed_shape: gl.constexpr = [CONFIG.STAGES, 1, 1, CONFIG.COLS, CONFIG.D]
    k_bufs = gl.allocate_shared_memory(q.dtype, resident_shape, k.layout)
    v_bufs = gl.allocate_shared_memory(q.dtype, resident_shape, v.layout)
    q_bufs = gl.allocate_shared_memory(q.dtype, streamed_shape, q.layout)
    g_bufs = gl.allocate_shared_memory(q.dtype, streamed_shape, grad_out.layout)
    out_bufs = gl.allocate_shared_memory(q.dtype, resident_shape, dk.layout)
    resident_full, resident_empty = allocate_barriers(CONFIG.CONSUMERS, 1)
    full, empty = allocate_barriers(CONFIG.STAGES, CONFIG.CONSUMERS)
    fence_async_shared()
    thread_barrier()
    buffers = (k_bufs, v_bufs, q_bufs, g_bufs)
    shared = BackwardShared(buffers, out_bufs, resident_full, resident_empty, full, empty)
    sizes = BackwardSizes(items, heads, tiles, n_q, n_k, key_blocks, head_blocks, term_rows)
    # Constexprs stand in the lists themselves: in a variable they would become tensors.
    gl.warp_specialize(
        [
            (_consumer, (dk, dv, pointers, shared, sizes, scalars, 0, CONFIG)),
            (_consumer, (dk, dv, pointers, shared, sizes, scalars, 1, CONFIG)),
            (backward_producer, (k, v, q, grad_out, pointers.lengths, shared, sizes, True, CONFIG)),
        ],
        [4, 1],
        [240, 24],
    )
