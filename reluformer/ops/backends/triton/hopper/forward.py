"""Warp-specialised forward kernel for Hopper, in Gluon, with the structure of FlashAttention-3.

It computes what `portable/forward.py` computes.

Work: a CTA is persistent and owns a list of query tiles, each CONSUMERS * ROWS rows of one head.
Packed sequences have a list in memory (`portable/packed_schedule.py`). For each query tile the CTA
loops over the key tiles that its rows see.

Partitions of warps:
    consumer 0   4 warps   query rows [0, ROWS) of each tile
    consumer 1   4 warps   query rows [ROWS, 2 * ROWS) of each tile
    consumer 2   4 warps   query rows [2 * ROWS, 3 * ROWS), with CONSUMERS = 3
    producer     1 warp    loads Q, K and V with TMA and runs ahead into the next query tile

A consumer issues S = Q K_j^T, then O += P_(j-1) V_(j-1), and computes the weights
P_j = max(S, 0)^p while the second product runs. The first scores of the next query tile are in
flight while the output of a tile is written. So the tensor cores wait neither for loads and stores
nor for weights. With CONVERT_LATE only the powers are computed beside the second product, and they
become weights after it: P_j takes the registers of P_(j-1), and the other consumers keep the tensor
cores busy meanwhile. This is how three consumers, with 160 registers a thread instead of 240, hold
their tiles without spills.

Shared memory, bfloat16:
    q      [ROWS, D]   one buffer per consumer, two unless Q_IN_REGISTERS
    k, v   [KEYS, D]   two rings of STAGES buffers, read by all consumers
    out    [ROWS, D]   one buffer per consumer: staging for the TMA store, or a V tile [KEYS, D]
                       whose padding is zeroed
Registers of a consumer:
    S [ROWS, KEYS] and O [ROWS, D] in float32, P [ROWS, KEYS] in bfloat16, partial row sums, and Q
    [ROWS, D] with Q_IN_REGISTERS

Barriers, one per buffer:
    q_full            TMA arrives (the producer expects its bytes)    the consumer waits
    q_empty           the consumer arrives                            the producer waits
    k_full, v_full    TMA arrives                                     all consumers wait
    k_empty, v_empty  each consumer arrives once                      the producer waits
A wait names the parity of the phase that must be complete. Consumers start with 0. The producer
starts with 1, which passes at once on a new barrier: all buffers are empty.

`tests/ops/backends/triton/hopper/test_forward.py` runs this protocol in an emulator.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from reluformer.ops.backends.triton.hopper.device import (
    Bounds,
    Ring,
    advance,
    end_block,
    key_tile_counts,
    opaque,
    release_loaded,
    scaled_threshold,
    store_tile,
    tile_count,
    zero_padding,
)
from reluformer.ops.backends.triton.hopper.forward_device import (
    ForwardSizes,
    allocate_shared,
    forward_producer,
    locate_tile,
    release_unread_keys,
    row_factor,
    store_rows,
)
from reluformer.ops.backends.triton.hopper.weights import (
    partial_even_sums,
    partial_log_sums,
    partial_row_sums,
    rectified,
    signed_powers,
)
from reluformer.ops.backends.triton.portable.device import BLOCK, LN2
from reluformer.ops.backends.triton.versions import thread_barrier


class KeyLoopState(NamedTuple):
    """State of a consumer that one key tile leaves to the next."""

    acc: Any
    """Output so far, [ROWS, D]."""
    s: Any
    """Registers of the scores, [ROWS, KEYS]."""
    p: Any
    """Weights of the last key tile, [ROWS, KEYS], as left operand."""
    row_sum: Any
    """Partial sums of weights, [ROWS, 8], or 0."""
    log_sum: Any
    """Partial sums of w log2 w, [ROWS, 4], or 0."""
    k_ring: Any
    v_ring: Any


@gluon.jit
def _wait_for_queries(shared, ring, consumer: gl.constexpr, CONFIG: gl.constexpr):
    """Wait for Q [ROWS, D] of a consumer and return it: in shared memory or in registers.

    In registers, its buffer is released at once.
    """
    layout: gl.constexpr = gl.DotOperandLayout(
        0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.KEYS, 16]), 2
    )
    place = ring.stage * CONFIG.CONSUMERS + consumer
    mbarrier.wait(shared.q_full.index(place), ring.phase)
    q_tile = shared.q.index(place).reshape([CONFIG.ROWS, CONFIG.D])
    if CONFIG.Q_IN_REGISTERS:
        q_tile = q_tile.load(layout)
        release_loaded(shared.q_empty.index(place))
    return q_tile


@gluon.jit
def _key_loop(
    state, q_tile, shared, low, high, bounds, threshold, scale, MASKED: gl.constexpr,
    LOGS: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Scores and weights of key tiles [low, high), and the products of the tiles one before.

    MASKED applies `bounds` to the weights; LOGS adds up w log2 w.
    """
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    acc, s, p, row_sum, log_sum, k_ring, v_ring = state
    for j in range(low, high):
        mbarrier.wait(shared.k_full.index(k_ring.stage), k_ring.phase)
        k_t = shared.k.index(k_ring.stage).reshape([CONFIG.KEYS, CONFIG.D]).permute((1, 0))
        s = warpgroup_mma(q_tile, k_t, s, use_acc=False, is_async=True)  # [ROWS, KEYS]
        mbarrier.wait(shared.v_full.index(v_ring.stage), v_ring.phase)
        v_tile = shared.v.index(v_ring.stage).reshape([CONFIG.KEYS, CONFIG.D])
        acc = warpgroup_mma(p, v_tile, acc, use_acc=j > 1, is_async=True)  # [ROWS, D]
        # At most one product stays in flight: the scores are complete.
        s = warpgroup_mma_wait(1, [s])
        mbarrier.arrive(shared.k_empty.index(k_ring.stage), count=1)
        k_ring = advance(k_ring, CONFIG.STAGES)
        w = signed_powers(s, bounds, j * CONFIG.KEYS, threshold, scale, MASKED, CONFIG)
        if not CONFIG.CONVERT_LATE:
            # The product in flight still reads the registers of p.
            w = rectified(w)
            if CONFIG.ROW_SUMS:
                row_sum += partial_row_sums(w)
        if LOGS:
            log_sum += partial_log_sums(w)
            # The next iteration waits again. Without this wait ptxas delays the logarithms until
            # the product in flight is complete.
            mbarrier.wait(shared.k_full.index(k_ring.stage), k_ring.phase)
        if (CONFIG.POWER > 1 or CONFIG.CONVERT_LATE) and not LOGS:
            end_block(v_ring.stage)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(shared.v_empty.index(v_ring.stage), count=1)
        v_ring = advance(v_ring, CONFIG.STAGES)
        if CONFIG.CONVERT_LATE:
            # Into the registers of p, which no product reads now.
            w = rectified(w)
            if CONFIG.ROW_SUMS:
                row_sum += partial_row_sums(w)
        p = gl.convert_layout(w, p_layout, assert_trivial=True)
    return KeyLoopState(acc, s, p, row_sum, log_sum, k_ring, v_ring)


@gluon.jit
def _key_tiles(
    state, q_tile, shared, q_stage, unmasked, count, bounds, threshold, scale, sample,
    LOGS: gl.constexpr, consumer: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """All key tiles but the first of a query tile: the KeyLoopState after them.

    Up to three loops: over tiles that need no mask, over tiles that need one and, where w log w is
    summed, over all tiles. `sample` says whether it is summed for this query tile; if not, the
    third loop has no iterations, and otherwise the first two have none.
    """
    MASK: gl.constexpr = CONFIG.CAUSAL or CONFIG.MASK_TAIL
    EVERY: gl.constexpr = CONFIG.ENTROPY_EVERY
    for loop in gl.static_range(3):
        if (
            (loop == 0 and not (LOGS and EVERY == 1))
            or (loop == 1 and MASK and not (LOGS and EVERY == 1))
            or (loop == 2 and LOGS)
        ):
            low = 1
            high = count
            if loop == 0 and MASK:
                high = unmasked
            if loop == 1:
                low = gl.maximum(unmasked, 1)
            if LOGS and EVERY > 1:
                high = gl.where(sample == (loop == 2), high, 0)
            if loop > 0 and not CONFIG.Q_IN_REGISTERS:
                place = opaque(q_stage) * CONFIG.CONSUMERS + consumer
                q_tile = shared.q.index(place).reshape([CONFIG.ROWS, CONFIG.D])
            state = _key_loop(
                state, q_tile, shared, low, high, bounds, threshold, scale, loop > 0 and MASK,
                loop == 2, CONFIG,
            )  # fmt: skip
    return state


@gluon.jit
def _write_tile(
    state, out, pointers, shared, work_tile, row, sizes, strides, scalars, sample,
    consumer: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Scale and store the output rows of a consumer, with their row sums: the scores in `state`.

    The first scores of the next query tile are in flight meanwhile.
    """
    acc, s, _p, row_sum, log_sum, _k, _v = state
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.D, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, o_layout)
    batch, head, _tile, first_q, _first_k, n_q, _n_k, _end = work_tile
    factor = row_factor(row, work_tile, scalars, pointers.gamma, CONFIG)  # [ROWS]
    row_scale = factor
    if CONFIG.ROW_SUMS:
        sums = factor * gl.convert_layout(gl.sum(row_sum, 1), row_layout)  # [ROWS]
        if CONFIG.ROW_NORMALISE:
            row_scale = factor / (sums + scalars.epsilon)
        rows = row + gl.arange(0, CONFIG.ROWS, row_layout)
        if pointers.work is None:
            places = (batch * sizes.heads + head).to(gl.int64) * n_q + rows
        else:
            places = (first_q + rows).to(gl.int64) * sizes.heads + head
        gl.store(pointers.row_sum + places, sums, mask=rows < n_q)
        if pointers.log_sum is not None:
            # sum of C w log(C w) from the sums of w and of w log2 w.
            logs = gl.convert_layout(gl.sum(log_sum, 1), row_layout)  # [ROWS]
            logs = LN2 * (gl.log2(gl.where(factor > 0, factor, 1.0)) * sums + factor * logs)
            gl.store(pointers.log_sum + places, gl.where(sample, logs, 0.0), mask=rows < n_q)
    result = (acc * row_scale[:, None]).to(gl.bfloat16)  # [ROWS, D]
    buffer = shared.out.index(consumer)
    if pointers.work is None:
        store_tile(result, out, buffer, batch, head, row)
        s = warpgroup_mma_wait(0, [s])
    else:
        # No product may be in flight around a branch. TMA clips at the end of the tensor, not at
        # the end of a packed sequence.
        s = warpgroup_mma_wait(0, [s])
        if row + CONFIG.ROWS <= n_q:
            store_tile(result, out, buffer, batch, head, first_q + row)
        else:
            store_rows(result, pointers.out, strides, work_tile, row)
    return s


@gluon.jit
def _start_scores(q_tile, shared, k_ring, s, CONFIG: gl.constexpr):
    """Wait for a K tile and start S = Q K^T [ROWS, KEYS] in the registers of s."""
    mbarrier.wait(shared.k_full.index(k_ring.stage), k_ring.phase)
    k_t = shared.k.index(k_ring.stage).reshape([CONFIG.KEYS, CONFIG.D]).permute((1, 0))
    return warpgroup_mma(q_tile, k_t, s, use_acc=False, is_async=True)


@gluon.jit
def _consumer(
    out, pointers, shared, sizes, strides, scalars, consumer: gl.constexpr,
    Q_BUFFERS: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute rows [consumer * ROWS, (consumer + 1) * ROWS) of every query tile of the CTA."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.KEYS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    LOGS: gl.constexpr = pointers.log_sum is not None
    steps = tile_count(sizes.items, CONFIG.CAUSAL)
    k_ring = Ring(0, 0)
    v_ring = Ring(0, 0)
    q_ring = Ring(0, 0)
    s = gl.zeros([CONFIG.ROWS, CONFIG.KEYS], gl.float32, s_layout)
    acc = gl.zeros([CONFIG.ROWS, CONFIG.D], gl.float32, o_layout)

    q_tile = _wait_for_queries(shared, q_ring, consumer, CONFIG)  # [ROWS, D]
    s = _start_scores(q_tile, shared, k_ring, s, CONFIG)
    s = warpgroup_mma_wait(0, [s])
    for step in range(0, steps):
        work_tile = locate_tile(step, sizes, pointers.lengths, pointers.work, CONFIG.CAUSAL)
        batch, head, tile, first_q, first_k, n_q, n_k, end = work_tile
        row = tile * (CONFIG.CONSUMERS * CONFIG.ROWS)
        offset = n_k - n_q
        # Which blocks of rows are sampled: the same as `entropy_wanted` of the portable kernels.
        sample = (row // BLOCK + head + batch) % CONFIG.ENTROPY_EVERY == 0
        # Key tiles that the producer loads for all consumers, and those that this one needs.
        loaded, _ = key_tile_counts(
            row, n_q, n_k, end, CONFIG.CONSUMERS * CONFIG.ROWS, CONFIG.KEYS, CONFIG.CAUSAL,
            CONFIG.MASK_TAIL,
        )  # fmt: skip
        row += consumer * CONFIG.ROWS
        count, unmasked = key_tile_counts(
            row, n_q, n_k, end, CONFIG.ROWS, CONFIG.KEYS, CONFIG.CAUSAL, CONFIG.MASK_TAIL
        )
        threshold = scaled_threshold(pointers.threshold, scalars, head, CONFIG.SCALE_SCORES)
        bounds = Bounds(row, offset, end)

        # The scores of the first key tile are complete.
        mbarrier.arrive(shared.k_empty.index(k_ring.stage), count=1)
        k_ring = advance(k_ring, CONFIG.STAGES)
        w = signed_powers(
            s, bounds, 0, threshold, scalars.scale, CONFIG.CAUSAL or CONFIG.MASK_TAIL, CONFIG
        )
        w = rectified(w)  # [ROWS, KEYS]
        row_sum = 0.0
        if CONFIG.ROW_SUMS:
            row_sum = partial_row_sums(w)
        log_sum = 0.0
        if LOGS:
            log_sum = partial_even_sums(gl.zeros([CONFIG.ROWS, CONFIG.KEYS], gl.float32, s_layout))
            if sample:
                log_sum = partial_log_sums(w)
        p = gl.convert_layout(w, p_layout, assert_trivial=True)
        state = KeyLoopState(acc, s, p, row_sum, log_sum, k_ring, v_ring)
        state = _key_tiles(
            state, q_tile, shared, q_ring.stage, unmasked, count, bounds, threshold,
            scalars.scale, sample, LOGS, consumer, CONFIG,
        )  # fmt: skip
        acc, s, p, row_sum, log_sum, k_ring, v_ring = state
        if not CONFIG.Q_IN_REGISTERS:
            place = q_ring.stage * CONFIG.CONSUMERS + consumer
            mbarrier.arrive(shared.q_empty.index(place), count=1)

        # O += P V of the last key tile.
        mbarrier.wait(shared.v_full.index(v_ring.stage), v_ring.phase)
        v_tile = shared.v.index(v_ring.stage).reshape([CONFIG.KEYS, CONFIG.D])
        if pointers.lengths is not None or pointers.work is not None:
            # The previous store must have read the buffer. Only thread 0 can wait for it.
            tma.store_wait(0)
            thread_barrier()
            buffer = shared.out.index(consumer)
            buffer = buffer.reshape([buffer.shape[2], CONFIG.D])
            v_tile = zero_padding(
                v_tile, buffer, (count - 1) * CONFIG.KEYS, end, CONFIG.KEYS, CONFIG.D
            )
        acc = warpgroup_mma(p, v_tile, acc, use_acc=count > 1, is_async=True)  # [ROWS, D]
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(shared.v_empty.index(v_ring.stage), count=1)
        v_ring = advance(v_ring, CONFIG.STAGES)
        k_ring, v_ring = release_unread_keys(shared, k_ring, v_ring, count, loaded, CONFIG.STAGES)

        # Start the first scores of the next query tile, then write this one.
        q_ring = advance(q_ring, Q_BUFFERS)
        q_tile = _wait_for_queries(shared, q_ring, consumer, CONFIG)
        s = _start_scores(q_tile, shared, k_ring, s, CONFIG)
        state = KeyLoopState(acc, s, p, row_sum, log_sum, k_ring, v_ring)
        s = _write_tile(
            state, out, pointers, shared, work_tile, row, sizes, strides, scalars, sample, consumer,
            CONFIG,
        )  # fmt: skip
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["items", "heads", "tiles", "n_q", "n_k"])
def hopper_forward_kernel(
    q, k, v, out, pointers, items, heads, tiles, n_q, n_k, strides, scalars, CONFIG: gl.constexpr
):
    """Output [B, H, Tq, D] and, with ROW_SUMS, the row sums [B, H, Tq].

    Args:
        q, k, v, out: TMA descriptors of [B, H, T, D], with tiles of ROWS and KEYS rows.
        pointers: a ForwardPointers.
        items .. n_k: the fields of ForwardSizes. They are arguments of their own because Triton
            specialises the integers of a tuple: another length would compile another kernel.
        strides: (head, row) strides of `out`, read for packed sequences only.
        scalars: a Scalars.
        config: a ForwardConfig of constexprs.
    """
    Q_BUFFERS: gl.constexpr = 1 if CONFIG.Q_IN_REGISTERS else 2
    if pointers.work is not None:
        items = gl.load(pointers.work) * heads
    shared = allocate_shared(q, k, v, out, Q_BUFFERS * CONFIG.CONSUMERS, CONFIG)
    fence_async_shared()
    thread_barrier()
    sizes = ForwardSizes(items, heads, tiles, n_q, n_k)
    # Constexprs stand in the lists themselves: in a variable they would become tensors.
    gl.warp_specialize(
        [
            (_consumer, (out, pointers, shared, sizes, strides, scalars, part, Q_BUFFERS, CONFIG))
            if part < CONFIG.CONSUMERS
            else (
                forward_producer,
                (q, k, v, pointers.lengths, pointers.work, shared, sizes, Q_BUFFERS, CONFIG),
            )
            for part in (0, 1, 2, 3)[: CONFIG.CONSUMERS + 1]
        ],
        [4, 4, 1] if CONFIG.CONSUMERS == 3 else [4, 1],
        [160, 160, 24] if CONFIG.CONSUMERS == 3 else [240, 24],
    )
