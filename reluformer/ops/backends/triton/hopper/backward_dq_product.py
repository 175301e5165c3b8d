"""Kernel for the gradient of queries from stored score gradients, for Hopper.

The dK/dV kernel has stored dS (`stored_gradients.py`), so that one product is left:

    dQ = dS K

A CTA owns tiles of 2 * ROWS queries of one head and loops over the key tiles that they see. Memory
limits its speed: ROWS queries per consumer share each key tile that is read.

Partitions of warps:
    consumer 0   4 warps   queries [0, ROWS) of each tile
    consumer 1   4 warps   queries [ROWS, 2 * ROWS) of each tile
    producer     1 warp    loads K and dS with TMA and runs ahead, also into the next query tile

Shared memory, bfloat16: a ring of STAGES buffers for K [COLS, D] and for the blocks of dS of each
consumer [ROWS, COLS], and staging for the TMA store [ROWS, D] per consumer. The barriers of a stage
are those of `backward_device.py`.

Registers of a consumer: dQ [ROWS, D] in float32 and pairs of dS [ROWS, COLS / 2].
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

from reluformer.ops.backends.triton.hopper.backward_device import (
    BackwardSizes,
    allocate_barriers,
    release_unread,
    streamed_tile,
    write_query_gradient,
)
from reluformer.ops.backends.triton.hopper.bf16_pairs import as_left_operand, partial_pair_sums
from reluformer.ops.backends.triton.hopper.device import (
    Bounds,
    Ring,
    advance,
    key_end,
    key_tile_counts,
    tile_coordinates,
    tile_count,
    zero_padding,
)
from reluformer.ops.backends.triton.hopper.stored_gradients import (
    SIDE,
    load_gradients,
    mask_pairs,
    missing_blocks,
)
from reluformer.ops.backends.triton.versions import thread_barrier, tma_load


class ProductShared(NamedTuple):
    """Buffers and barriers in shared memory."""

    keys: Any
    """One per stage."""
    gradients: Any
    """One per stage and consumer."""
    out: Any
    full: Any
    empty: Any


@gluon.jit
def _producer(gradients, k, lengths, shared, sizes, CONFIG: gl.constexpr):
    """Load the keys and score gradients of each step."""
    TILE_ROWS: gl.constexpr = CONFIG.CONSUMERS * CONFIG.ROWS
    BYTES: gl.constexpr = 2 * CONFIG.COLS * (CONFIG.D + TILE_ROWS)
    # Phase 1: the first wait for each buffer passes.
    ring = Ring(0, 1)
    for step in range(0, tile_count(sizes.items, CONFIG.CAUSAL)):
        batch, head, tile = tile_coordinates(step, sizes, CONFIG.CAUSAL)
        row = tile * TILE_ROWS
        count, _ = key_tile_counts(
            row, sizes.n_q, sizes.n_k, key_end(lengths, batch, sizes.n_k), TILE_ROWS, CONFIG.COLS,
            CONFIG.CAUSAL, True,
        )  # fmt: skip
        # Blocks of a key tile follow one another along the queries.
        place = (batch * sizes.heads + head) * (sizes.head_blocks * SIDE) + row
        for j in range(0, count):
            mbarrier.wait(shared.empty.index(ring.stage), ring.phase)
            bar = shared.full.index(ring.stage)
            mbarrier.expect(bar, BYTES)
            tma_load(
                k, [batch, head // CONFIG.GROUP, j * CONFIG.COLS, 0], bar,
                shared.keys.index(ring.stage),
            )  # fmt: skip
            for consumer in gl.static_range(CONFIG.CONSUMERS):
                tma_load(
                    gradients, [0, 0, place + consumer * CONFIG.ROWS, 0], bar,
                    shared.gradients.index(ring.stage * CONFIG.CONSUMERS + consumer),
                )  # fmt: skip
            place += sizes.term_rows
            if CONFIG.COMPACT:
                place -= missing_blocks(j + 1, sizes) * SIDE
            ring = advance(ring, CONFIG.STAGES)


@gluon.jit
def _key_loop(
    acc, row_shift, ring, shared, low, high, bounds, ROW_SHIFT: gl.constexpr,
    MASKED: gl.constexpr, PADDED: gl.constexpr, consumer: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Add dS K of key tiles [low, high): (dQ, sums of dS per row, ring) after them.

    Args:
        MASKED: whether some rows may not see some of the keys.
        PADDED: whether keys past the end may be NaN.
    """
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    for j in range(low, high):
        mbarrier.wait(shared.full.index(ring.stage), ring.phase)
        blocks = shared.gradients.index(ring.stage * CONFIG.CONSUMERS + consumer)
        blocks = blocks.reshape([CONFIG.ROWS, CONFIG.COLS])  # [ROWS, COLS]
        ds = load_gradients(blocks, CONFIG.ROWS)  # [ROWS, COLS / 2]
        k_tile = streamed_tile(shared.keys, ring.stage, CONFIG)  # [COLS, D]
        if MASKED:
            ds = mask_pairs(ds, bounds, j * CONFIG.COLS, CONFIG.CAUSAL)
        if MASKED and PADDED:
            # The previous store must have read the buffer. Only thread 0 can wait for it.
            tma.store_wait(0)
            thread_barrier()
            buffer = shared.out.index(consumer).reshape([CONFIG.ROWS, CONFIG.D])  # [ROWS, D]
            k_tile = zero_padding(
                k_tile, buffer, j * CONFIG.COLS, bounds.end, CONFIG.COLS, CONFIG.D
            )
        acc = warpgroup_mma(as_left_operand(ds, p_layout), k_tile, acc, is_async=True)  # [ROWS, D]
        if ROW_SHIFT:
            row_layout: gl.constexpr = row_shift.type.layout
            row_shift += gl.convert_layout(gl.sum(partial_pair_sums(ds), 1), row_layout)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(shared.empty.index(ring.stage), count=1)
        ring = advance(ring, CONFIG.STAGES)
    return acc, row_shift, ring


@gluon.jit
def _consumer(dq, pointers, shared, sizes, scalars, consumer: gl.constexpr, CONFIG: gl.constexpr):
    """Compute dQ of rows [consumer * ROWS, (consumer + 1) * ROWS) of every query tile."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.COLS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.D, 16])
    ROW_SHIFT: gl.constexpr = pointers.row_shift is not None
    PADDED: gl.constexpr = pointers.lengths is not None
    # With a threshold, a key that does not exist can have weight and a gradient.
    MASK_TAIL: gl.constexpr = PADDED or (ROW_SHIFT and CONFIG.RAGGED)
    HAS_MASKED: gl.constexpr = MASK_TAIL or CONFIG.CAUSAL
    TILE_ROWS: gl.constexpr = CONFIG.CONSUMERS * CONFIG.ROWS
    ring = Ring(0, 0)
    for step in range(0, tile_count(sizes.items, CONFIG.CAUSAL)):
        batch, head, tile = tile_coordinates(step, sizes, CONFIG.CAUSAL)
        row = tile * TILE_ROWS
        end = key_end(pointers.lengths, batch, sizes.n_k)
        # Key tiles that the producer loads for both consumers, and those that this one needs.
        loaded, _ = key_tile_counts(
            row, sizes.n_q, sizes.n_k, end, TILE_ROWS, CONFIG.COLS, CONFIG.CAUSAL, True
        )
        row += consumer * CONFIG.ROWS
        count, unmasked = key_tile_counts(
            row, sizes.n_q, sizes.n_k, end, CONFIG.ROWS, CONFIG.COLS, CONFIG.CAUSAL, MASK_TAIL
        )
        bounds = Bounds(row, sizes.n_k - sizes.n_q, end)
        acc = gl.zeros([CONFIG.ROWS, CONFIG.D], gl.float32, o_layout)  # [ROWS, D]
        row_shift = gl.zeros([CONFIG.ROWS], gl.float32, gl.SliceLayout(1, s_layout))  # [ROWS]
        if HAS_MASKED:
            acc, row_shift, ring = _key_loop(
                acc, row_shift, ring, shared, 0, unmasked, bounds, ROW_SHIFT, False, PADDED,
                consumer, CONFIG,
            )  # fmt: skip
            acc, row_shift, ring = _key_loop(
                acc, row_shift, ring, shared, unmasked, count, bounds, ROW_SHIFT, True, PADDED,
                consumer, CONFIG,
            )  # fmt: skip
        else:
            acc, row_shift, ring = _key_loop(
                acc, row_shift, ring, shared, 0, count, bounds, ROW_SHIFT, False, PADDED, consumer,
                CONFIG,
            )  # fmt: skip
        ring = release_unread(shared, ring, loaded - count, CONFIG.STAGES)
        write_query_gradient(
            acc, row_shift, dq, batch, head, row, end, pointers, shared.out.index(consumer), sizes,
            scalars, CONFIG,
        )  # fmt: skip
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["items", "heads", "tiles", "n_q", "n_k", "key_blocks", "head_blocks"])
def hopper_dq_product_kernel(
    gradients, k, dq, pointers, items, heads, tiles, n_q, n_k, key_blocks, head_blocks, term_rows,
    scalars, CONFIG: gl.constexpr,
):  # fmt: skip
    """dQ [B, H, Tq, D] and, if `pointers` has it, `row_shift` [B, H, Tq]: the sum of dS per row.

    Args:
        gradients: TMA descriptor of the blocks of dS as [1, 1, rows, 64], with tiles of ROWS rows.
        k, dq: TMA descriptors of [B, H, T, D], with tiles of COLS and of ROWS rows.
        pointers: a BackwardPointers.
        items .. term_rows: the fields of BackwardSizes; `heads` are query heads.
        scalars: a Scalars.
        CONFIG: a BackwardConfig of constexprs.
    """
    keys_shape: gl.constexpr = [CONFIG.STAGES, 1, 1, CONFIG.COLS, CONFIG.D]
    TILES: gl.constexpr = CONFIG.STAGES * CONFIG.CONSUMERS
    gradients_shape: gl.constexpr = [TILES, 1, 1, CONFIG.ROWS, CONFIG.COLS]
    out_shape: gl.constexpr = [CONFIG.CONSUMERS, 1, 1, CONFIG.ROWS, CONFIG.D]
    k_bufs = gl.allocate_shared_memory(k.dtype, keys_shape, k.layout)
    gradient_bufs = gl.allocate_shared_memory(k.dtype, gradients_shape, gradients.layout)
    out_bufs = gl.allocate_shared_memory(k.dtype, out_shape, dq.layout)
    full, empty = allocate_barriers(CONFIG.STAGES, CONFIG.CONSUMERS)
    fence_async_shared()
    thread_barrier()
    shared = ProductShared(k_bufs, gradient_bufs, out_bufs, full, empty)
    sizes = BackwardSizes(items, heads, tiles, n_q, n_k, key_blocks, head_blocks, term_rows)
    # Constexprs stand in the lists themselves: in a variable they would become tensors.
    gl.warp_specialize(
        [
            (_consumer, (dq, pointers, shared, sizes, scalars, 0, CONFIG)),
            (_consumer, (dq, pointers, shared, sizes, scalars, 1, CONFIG)),
            (_producer, (gradients, k, pointers.lengths, shared, sizes, CONFIG)),
        ],
        [4, 1],
        [240, 24],
    )
