"""Warp-specialised kernel for the gradient of queries, for Hopper.

It computes what `portable/backward_dq.py` computes. `backward_device.py` describes the partitions
of warps, shared memory and barriers, which are those of `backward_dkv.py` too.

A CTA owns tiles of CONSUMERS * ROWS queries of one head: Q and dO are resident. For each tile it
loops over the key tiles that the queries see: K and V are streamed.

    S = Q K^T    dP = dO V^T    dQ += dS K

`backward_dq_loops.py` has two loops. At power 1 an iteration starts S and dP of this key tile and
dQ of the previous one, then computes dS. Above, it starts S, computes dS of the previous key tile,
starts its dQ and dP of this one, and computes the slopes max(s, 0)^(p - 1). With SIGNS the dK/dV
kernel has stored the signs of the weights (power 1): neither S nor Q is needed, and dS is dP where
the sign is set. The sign words of the next key tile are loaded one iteration ahead.

Registers of a consumer: S and dP [ROWS, COLS] and dQ [ROWS, D] in float32, pairs of dS
(`bf16_pairs.py`), sign words, and Q and dO [ROWS, D] with IN_REGISTERS.
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
    release_unread,
    resident_tile,
    streamed_tile,
    write_query_gradient,
)
from reluformer.ops.backends.triton.hopper.backward_dq_loops import (
    DqLoopState,
    key_loop,
    late_gradients,
    power_loop,
    slopes,
    tile_gradients,
)
from reluformer.ops.backends.triton.hopper.bf16_pairs import (
    as_left_operand,
    partial_pair_sums,
    sign_pointers,
)
from reluformer.ops.backends.triton.hopper.device import (
    Bounds,
    Ring,
    advance,
    key_end,
    key_tile_counts,
    mask_keys,
    opaque,
    release_loaded,
    scaled_threshold,
    tile_coordinates,
    tile_count,
    zero_padding,
)
from reluformer.ops.backends.triton.versions import thread_barrier


@gluon.jit
def _key_tiles(
    state, q_tile, g_tile, shared, unmasked, count, resident_phase, row_terms, bounds, threshold,
    scale, ROW_SHIFT: gl.constexpr, MASK_TAIL: gl.constexpr, consumer: gl.constexpr,
    CONFIG: gl.constexpr,
):  # fmt: skip
    """All key tiles but the first of a query tile: the state after them.

    A loop over the tiles that need no mask and, where there can be others, one over the rest.
    """
    # Keys that are not visible by causality have no sign bit.
    HAS_MASKED: gl.constexpr = MASK_TAIL or (CONFIG.CAUSAL and not CONFIG.SIGNS)
    q_bufs, g_bufs, _k_bufs, _v_bufs = shared.buffers
    low = 1
    high = count
    for loop in gl.static_range(2 if HAS_MASKED else 1):
        if HAS_MASKED:
            if loop == 0:
                high = gl.minimum(unmasked, count)
            else:
                low = gl.maximum(unmasked, 1)
                high = count
                if not CONFIG.IN_REGISTERS:
                    place = opaque(resident_phase * 0 + consumer)
                    if not CONFIG.SIGNS:
                        q_tile = resident_tile(q_bufs, place, False, CONFIG)
                    g_tile = resident_tile(g_bufs, place, False, CONFIG)
        if CONFIG.POWER > 1:
            state = power_loop(
                state, q_tile, g_tile, shared, low, high, row_terms, bounds, threshold, scale,
                ROW_SHIFT, loop == 1, CONFIG,
            )  # fmt: skip
        else:
            state = key_loop(
                state, q_tile, g_tile, shared, low, high, row_terms, bounds, threshold, scale,
                ROW_SHIFT, loop == 1, MASK_TAIL, CONFIG,
            )  # fmt: skip
    return state


@gluon.jit
def _wait_for_resident(shared, phase, consumer: gl.constexpr, CONFIG: gl.constexpr):
    """Wait for (Q, dO) [ROWS, D] of a consumer; with SIGNS, Q is 0.

    In registers, their buffers are released at once.
    """
    q_bufs, g_bufs, _k_bufs, _v_bufs = shared.buffers
    mbarrier.wait(shared.resident_full.index(consumer), phase)
    q_tile = 0
    if not CONFIG.SIGNS:
        q_tile = resident_tile(q_bufs, consumer, CONFIG.IN_REGISTERS, CONFIG)
    g_tile = resident_tile(g_bufs, consumer, CONFIG.IN_REGISTERS, CONFIG)
    if CONFIG.IN_REGISTERS:
        release_loaded(shared.resident_empty.index(consumer))
    return q_tile, g_tile


@gluon.jit
def _start_first_product(
    q_tile, g_tile, shared, ring, s, dp, words, words_at, step, sizes, consumer: gl.constexpr,
    CONFIG: gl.constexpr,
):  # fmt: skip
    """Start the first product of a step, whose first key tile has arrived: (s, dp, words).

    It is S = Q K^T or, with SIGNS, dP = dO V^T; then the sign words of the first key tile are
    loaded too. `words_at` are pointers from `sign_pointers`.
    """
    _q_bufs, _g_bufs, k_bufs, v_bufs = shared.buffers
    if CONFIG.SIGNS:
        batch, head, tile = tile_coordinates(step, sizes, CONFIG.CAUSAL)
        block = (batch * sizes.heads + head).to(gl.int64) * sizes.head_blocks
        block += (tile * CONFIG.CONSUMERS + consumer) * (CONFIG.ROWS // 64) * sizes.key_blocks
        words = gl.load(words_at + block * 128)
        v_t = streamed_tile(v_bufs, ring.stage, CONFIG).permute((1, 0))
        dp = warpgroup_mma(g_tile, v_t, dp, use_acc=False, is_async=True)  # [ROWS, COLS]
    else:
        k_t = streamed_tile(k_bufs, ring.stage, CONFIG).permute((1, 0))
        s = warpgroup_mma(q_tile, k_t, s, use_acc=False, is_async=True)  # [ROWS, COLS]
    return s, dp, words


@gluon.jit
def _consumer(dq, pointers, shared, sizes, scalars, consumer: gl.constexpr, CONFIG: gl.constexpr):
    """Compute dQ of rows [consumer * ROWS, (consumer + 1) * ROWS) of every query tile."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.COLS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    TILE_ROWS: gl.constexpr = CONFIG.CONSUMERS * CONFIG.ROWS
    ROW_SHIFT: gl.constexpr = pointers.row_shift is not None
    # With a threshold, a key that does not exist can have weight and a gradient.
    MASK_TAIL: gl.constexpr = pointers.lengths is not None or (ROW_SHIFT and CONFIG.RAGGED)
    HAS_MASKED: gl.constexpr = MASK_TAIL or (CONFIG.CAUSAL and not CONFIG.SIGNS)
    _q_bufs, _g_bufs, k_bufs, v_bufs = shared.buffers
    offset = sizes.n_k - sizes.n_q
    steps = tile_count(sizes.items, CONFIG.CAUSAL)
    resident_phase = 0
    ring = Ring(0, 0)
    s = gl.zeros([CONFIG.ROWS, CONFIG.COLS], gl.float32, s_layout)
    dp = gl.zeros([CONFIG.ROWS, CONFIG.COLS], gl.float32, s_layout)
    acc = gl.zeros([CONFIG.ROWS, CONFIG.D], gl.float32, o_layout)
    words = 0
    words_at = 0
    if CONFIG.SIGNS:
        words_at = sign_pointers(pointers.stored, dp)

    q_tile, g_tile = _wait_for_resident(shared, 0, consumer, CONFIG)  # [ROWS, D]
    mbarrier.wait(shared.full.index(ring.stage), ring.phase)
    s, dp, words = _start_first_product(
        q_tile, g_tile, shared, ring, s, dp, words, words_at, 0, sizes, consumer, CONFIG
    )
    if CONFIG.SIGNS:
        dp = warpgroup_mma_wait(0, [dp])
    else:
        s = warpgroup_mma_wait(0, [s])
    for step in range(0, steps):
        batch, head, tile = tile_coordinates(step, sizes, CONFIG.CAUSAL)
        row = tile * TILE_ROWS
        end = key_end(pointers.lengths, batch, sizes.n_k)
        # Key tiles that the producer loads for all consumers, and those that this one needs.
        loaded, _ = key_tile_counts(
            row, sizes.n_q, sizes.n_k, end, TILE_ROWS, CONFIG.COLS, CONFIG.CAUSAL, True
        )
        row += consumer * CONFIG.ROWS
        count, unmasked = key_tile_counts(
            row, sizes.n_q, sizes.n_k, end, CONFIG.ROWS, CONFIG.COLS, CONFIG.CAUSAL, MASK_TAIL
        )
        bounds = Bounds(row, offset, end)
        threshold = scaled_threshold(pointers.threshold, scalars, head, CONFIG.SCALE_SCORES)
        row_terms = 0.0
        if CONFIG.ROW_TERMS:
            rows = row + gl.arange(0, CONFIG.ROWS, row_layout)
            places = (
                pointers.terms + (batch * sizes.heads + head).to(gl.int64) * sizes.term_rows + rows
            )
            row_terms = gl.load(places, mask=rows < sizes.term_rows, other=0.0)  # [ROWS]

        # The first product of the first key tile is complete.
        blocks = 0
        if CONFIG.SIGNS:
            block = (batch * sizes.heads + head).to(gl.int64) * sizes.head_blocks
            block += row // 64 * sizes.key_blocks
            blocks = words_at + block * 128 + 128
            next_words = gl.load(blocks)
        else:
            v_t = streamed_tile(v_bufs, ring.stage, CONFIG).permute((1, 0))
            dp = warpgroup_mma(g_tile, v_t, dp, use_acc=False, is_async=True)  # [ROWS, COLS]
        row_shift = 0.0
        if CONFIG.POWER > 1:
            # The slopes stand in for dS, which is computed one tile later.
            ds = slopes(s, bounds, 0, threshold, scalars.scale, HAS_MASKED, CONFIG)
            dp = warpgroup_mma_wait(0, [dp])
            if ROW_SHIFT:
                # Zeros of the right layout.
                row_shift = partial_pair_sums(ds ^ ds)
        else:
            ds, s, dp = tile_gradients(
                s, dp, words, row_terms, bounds, 0, threshold, scalars.scale, HAS_MASKED,
                MASK_TAIL, 0, CONFIG,
            )  # fmt: skip
            if ROW_SHIFT:
                row_shift = partial_pair_sums(ds)
        if CONFIG.SIGNS:
            words = next_words
        held = ring.stage
        ring = advance(ring, CONFIG.STAGES)

        state = DqLoopState(ring, s, dp, acc, words, blocks, ds, row_shift, held)
        state = _key_tiles(
            state, q_tile, g_tile, shared, unmasked, count, resident_phase, row_terms, bounds,
            threshold, scalars.scale, ROW_SHIFT, MASK_TAIL, consumer, CONFIG,
        )  # fmt: skip
        ring, s, dp, acc, words, blocks, ds, row_shift, held = state
        if not CONFIG.IN_REGISTERS:
            mbarrier.arrive(shared.resident_empty.index(consumer), count=1)
        resident_phase ^= 1

        if CONFIG.POWER > 1:
            if MASK_TAIL:
                # Padding may hold NaN.
                dp = mask_keys(dp, bounds, (count - 1) * CONFIG.COLS, False)
            # The loop has left dP and the slopes of the last key tile.
            ds = late_gradients(dp, ds, row_terms, CONFIG)
            if ROW_SHIFT:
                row_shift += partial_pair_sums(ds)
        # dQ += dS K of the last key tile.
        k_tile = streamed_tile(k_bufs, held, CONFIG)
        if pointers.lengths is not None:
            # The previous store must have read the buffer. Only thread 0 can wait for it.
            tma.store_wait(0)
            thread_barrier()
            buffer = shared.out.index(consumer)
            buffer = buffer.reshape([buffer.shape[2], CONFIG.D])
            k_tile = zero_padding(
                k_tile, buffer, (count - 1) * CONFIG.COLS, end, CONFIG.COLS, CONFIG.D
            )
        acc = warpgroup_mma(
            as_left_operand(ds, p_layout), k_tile, acc, use_acc=count > 1, is_async=True
        )  # [ROWS, D]
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(shared.empty.index(held), count=1)
        ring = release_unread(shared, ring, loaded - count, CONFIG.STAGES)

        # Start the first product of the next step, then write this one's gradient.
        q_tile, g_tile = _wait_for_resident(shared, resident_phase, consumer, CONFIG)
        mbarrier.wait(shared.full.index(ring.stage), ring.phase)
        s, dp, words = _start_first_product(
            q_tile, g_tile, shared, ring, s, dp, words, words_at, step + 1, sizes, consumer, CONFIG
        )
        if ROW_SHIFT:
            row_shift = gl.convert_layout(gl.sum(row_shift, 1), row_layout)  # [ROWS]
        write_query_gradient(
            acc, row_shift, dq, batch, head, row, end, pointers, shared.out.index(consumer), sizes,
            scalars, CONFIG,
        )  # fmt: skip
        if CONFIG.SIGNS:
            dp = warpgroup_mma_wait(0, [dp])
        else:
            s = warpgroup_mma_wait(0, [s])
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["items", "heads", "tiles", "n_q", "n_k", "key_blocks", "head_blocks"])
def hopper_dq_kernel(
    q, k, v, grad_out, dq, pointers, items, heads, tiles, n_q, n_k, key_blocks, head_blocks,
    term_rows, scalars, CONFIG: gl.constexpr,
):  # fmt: skip
    """dQ [B, H, Tq, D] and, if `pointers` has it, `row_shift` [B, H, Tq]: the sum of dS per row.

    Args:
        q, k, v, grad_out, dq: TMA descriptors of [B, H, T, D], with tiles of COLS rows of k and v
            and of ROWS rows of the others.
        pointers: a BackwardPointers.
        items .. term_rows: the fields of BackwardSizes; `heads` are query heads.
        scalars: a Scalars.
        CONFIG: a BackwardConfig of constexprs.
    """
    resident_shape: gl.constexpr = [CONFIG.CONSUMERS, 1, 1, CONFIG.ROWS, CONFIG.D]
    streamed_shape: gl.constexpr = [CONFIG.STAGES, 1, 1, CONFIG.COLS, CONFIG.D]
    g_bufs = gl.allocate_shared_memory(q.dtype, resident_shape, grad_out.layout)
    q_bufs = g_bufs
    if not CONFIG.SIGNS:
        q_bufs = gl.allocate_shared_memory(q.dtype, resident_shape, q.layout)
    k_bufs = gl.allocate_shared_memory(q.dtype, streamed_shape, k.layout)
    v_bufs = gl.allocate_shared_memory(q.dtype, streamed_shape, v.layout)
    # It also holds a copy of a key tile.
    out_rows: gl.constexpr = CONFIG.ROWS if CONFIG.ROWS > CONFIG.COLS else CONFIG.COLS
    out_shape: gl.constexpr = [CONFIG.CONSUMERS, 1, 1, out_rows, CONFIG.D]
    out_bufs = gl.allocate_shared_memory(q.dtype, out_shape, dq.layout)
    resident_full, resident_empty = allocate_barriers(CONFIG.CONSUMERS, 1)
    full, empty = allocate_barriers(CONFIG.STAGES, CONFIG.CONSUMERS)
    fence_async_shared()
    thread_barrier()
    buffers = (q_bufs, g_bufs, k_bufs, v_bufs)
    shared = BackwardShared(buffers, out_bufs, resident_full, resident_empty, full, empty)
    sizes = BackwardSizes(items, heads, tiles, n_q, n_k, key_blocks, head_blocks, term_rows)
    # Constexprs stand in the lists themselves: in a variable they would become tensors.
    gl.warp_specialize(
        [
            (_consumer, (dq, pointers, shared, sizes, scalars, part, CONFIG))
            if part < CONFIG.CONSUMERS
            else (
                backward_producer,
                (q, grad_out, k, v, pointers.lengths, shared, sizes, False, CONFIG),
            )
            for part in (0, 1, 2, 3)[: CONFIG.CONSUMERS + 1]
        ],
        [4, 4, 1] if CONFIG.CONSUMERS == 3 else [4, 1],
        [160, 160, 24] if CONFIG.CONSUMERS == 3 else [240, 24],
    )
