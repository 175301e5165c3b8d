"""Device functions and structure that the two warp-specialised backward kernels share.

Each kernel keeps two resident operands of a tile and streams tiles of the two others, in pairs:

    dK/dV   resident K, V    streamed Q, dO    S^T = K Q^T   dP^T = V dO^T   dV += P^T dO
                                                                             dK += dS^T Q
    dQ      resident Q, dO   streamed K, V     S = Q K^T     dP = dO V^T     dQ += dS K

`portable/backward_dkv.py` has the formulas. If the row factors differ between rows, the host has
multiplied dO by them (GRAD_SCALED), and also the terms that gradients of row sums add to dP.

Work: a CTA is persistent and owns a list of tiles of CONSUMERS * ROWS resident rows.

Partitions of warps:
    consumer 0   4 warps   resident rows [0, ROWS) of each tile
    consumer 1   4 warps   resident rows [ROWS, 2 * ROWS) of each tile
    consumer 2   4 warps   resident rows [2 * ROWS, 3 * ROWS), with CONSUMERS = 3 (dQ only)
    producer     1 warp    loads resident and streamed tiles with TMA and runs ahead

A consumer holds the weights and score gradients of one streamed tile in registers. It starts the
products with them and computes those of the next streamed tile meanwhile. No product is in flight
between two iterations of a loop: ptxas would then serialise all products.

Shared memory, bfloat16:
    resident   2 x [ROWS, D] per consumer
    streamed   a ring of STAGES pairs of [COLS, D], read by all consumers
    out        [ROWS, D] per consumer: staging for the TMA store

Barriers:
    resident_full   one per consumer   TMA arrives                    the consumer waits
    resident_empty  one per consumer   the consumer arrives           the producer waits
    full            one per stage      TMA arrives                    all consumers wait
    empty           one per stage      each consumer arrives once     the producer waits
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from reluformer.ops.backends.triton.hopper.device import (
    Ring,
    advance,
    key_end,
    key_tile_counts,
    store_tile,
    tile_coordinates,
    tile_count,
)
from reluformer.ops.backends.triton.versions import thread_barrier, tma_load


class BackwardSizes(NamedTuple):
    """Extent of the work and of the tensors that are addressed by pointer, in scalars."""

    items: Any
    """Work items of all CTAs: tiles or, with causality, pairs of tiles."""
    heads: Any
    """Heads of the resident tensors."""
    tiles: Any
    """Tiles per head, of CONSUMERS * ROWS rows each."""
    n_q: Any
    n_k: Any
    key_blocks: Any
    """Sign blocks of 64 x 64 along the keys."""
    head_blocks: Any
    """Sign blocks of a head."""
    term_rows: Any
    """Rows of a head in `terms`."""


class BackwardShared(NamedTuple):
    """Buffers and barriers in shared memory."""

    buffers: Any
    """Two resident buffers, then two streamed ones."""
    out: Any
    resident_full: Any
    resident_empty: Any
    full: Any
    empty: Any


@gluon.jit
def query_tile_range(base, key, end, sizes, ROWS: gl.constexpr, CONFIG: gl.constexpr):
    """(first, end) of the query tiles that see keys [key, key + ROWS), at least one tile, and the
    tile from which on all of these keys are visible.

    `base` is the first key of the CTA's tile. If it does not exist, both consumers process the last
    query tile only.
    """
    high = (sizes.n_q + CONFIG.COLS - 1) // CONFIG.COLS
    # Zeros of the type of `key`, so that both branches of a condition agree.
    low = key * 0
    unmasked = key * 0
    if CONFIG.CAUSAL:
        offset = sizes.n_k - sizes.n_q
        # The first query that sees the first key, and the first that sees the last key.
        low = gl.minimum(gl.maximum(key - offset, 0) // CONFIG.COLS, high - 1)
        last = gl.maximum(key + ROWS - 1 - offset, 0)
        unmasked = (last + CONFIG.COLS - 1) // CONFIG.COLS
    return gl.where(base < end, low, high - 1), high, unmasked


@gluon.jit
def allocate_barriers(COUNT: gl.constexpr, READERS: gl.constexpr):
    """(full, empty) barriers of COUNT buffers; a fence and a CTA barrier must follow.

    `full` completes when a TMA copy has arrived, `empty` when READERS consumers have arrived.
    """
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [COUNT, 1], layout)
    empty = gl.allocate_shared_memory(gl.int64, [COUNT, 1], layout)
    for i in gl.static_range(COUNT):
        # The producer arrives once and announces the bytes; TMA completes the phase.
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return full, empty


@gluon.jit
def backward_producer(
    resident_a, resident_b, streamed_a, streamed_b, lengths, shared, sizes, IS_DKV: gl.constexpr,
    CONFIG: gl.constexpr,
):  # fmt: skip
    """Load the resident tiles of each step and stream the tiles that it needs.

    Consumers start the next step before they finish one, also after the last one. Therefore one
    more resident and one more streamed tile are loaded at the end. dQ with SIGNS reads no Q: it has
    only `resident_b`.
    """
    resident_a_bufs, resident_b_bufs, streamed_a_bufs, streamed_b_bufs = shared.buffers
    ONLY_B: gl.constexpr = CONFIG.SIGNS and not IS_DKV
    RESIDENT_BYTES: gl.constexpr = CONFIG.ROWS * CONFIG.D * (2 if ONLY_B else 4)
    TILE_ROWS: gl.constexpr = CONFIG.CONSUMERS * CONFIG.ROWS
    steps = tile_count(sizes.items, CONFIG.CAUSAL)
    # Phase 1: the first wait for each buffer passes.
    resident_phase = 1
    ring = Ring(0, 1)
    for step in range(0, steps + 1):
        batch, head, tile = tile_coordinates(step, sizes, CONFIG.CAUSAL)
        # First resident row of the CTA: a key of dK/dV, a query of dQ.
        row = tile * TILE_ROWS
        end = key_end(lengths, batch, sizes.n_k)
        # Range [low, high) of streamed tiles that either consumer needs.
        low = row * 0
        if IS_DKV:
            low, high, _ = query_tile_range(row, row, end, sizes, TILE_ROWS, CONFIG)
        else:
            high, _ = key_tile_counts(
                row, sizes.n_q, sizes.n_k, end, TILE_ROWS, CONFIG.COLS, CONFIG.CAUSAL, True
            )
        # After the last step, one streamed tile of one head.
        members = gl.where(step < steps, CONFIG.GROUP if IS_DKV else 1, 1)
        high = gl.where(step < steps, high, low + 1)
        for consumer in gl.static_range(CONFIG.CONSUMERS):
            first_row = row + consumer * CONFIG.ROWS
            mbarrier.wait(shared.resident_empty.index(consumer), resident_phase)
            bar = shared.resident_full.index(consumer)
            # One barrier for both resident tiles of a consumer.
            mbarrier.expect(bar, RESIDENT_BYTES)
            if not ONLY_B:
                tma_load(
                    resident_a, [batch, head, first_row, 0], bar, resident_a_bufs.index(consumer)
                )
            tma_load(resident_b, [batch, head, first_row, 0], bar, resident_b_bufs.index(consumer))
        resident_phase ^= 1
        # dK/dV sums over the query heads of a group: their tiles are streamed one head after
        # the other.
        for member in range(0, members):
            streamed_head = head * CONFIG.GROUP + member if IS_DKV else head // CONFIG.GROUP
            for t in range(low, high):
                mbarrier.wait(shared.empty.index(ring.stage), ring.phase)
                bar = shared.full.index(ring.stage)
                # Two tiles of 2 bytes per element.
                mbarrier.expect(bar, CONFIG.COLS * CONFIG.D * 4)
                tma_load(
                    streamed_a, [batch, streamed_head, t * CONFIG.COLS, 0], bar,
                    streamed_a_bufs.index(ring.stage),
                )  # fmt: skip
                tma_load(
                    streamed_b, [batch, streamed_head, t * CONFIG.COLS, 0], bar,
                    streamed_b_bufs.index(ring.stage),
                )  # fmt: skip
                ring = advance(ring, CONFIG.STAGES)


@gluon.jit
def resident_tile(bufs, consumer, IN_REGISTERS: gl.constexpr, CONFIG: gl.constexpr):
    """A resident operand [ROWS, D] of a consumer: in shared memory or loaded into registers."""
    layout: gl.constexpr = gl.DotOperandLayout(
        0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.COLS, 16]), 2
    )
    tile = bufs.index(consumer).reshape([CONFIG.ROWS, CONFIG.D])  # [ROWS, D]
    if IN_REGISTERS:
        tile = tile.load(layout)
    return tile


@gluon.jit
def streamed_tile(bufs, stage, CONFIG: gl.constexpr):
    """A streamed tile [COLS, D] in shared memory."""
    return bufs.index(stage).reshape([CONFIG.COLS, CONFIG.D])  # [COLS, D]


@gluon.jit
def release_unread(shared, ring, count, STAGES: gl.constexpr):
    """Release `count` streamed tiles that only the other consumer needs: the ring after them."""
    for _ in range(0, count):
        mbarrier.wait(shared.full.index(ring.stage), ring.phase)
        # A warp that is late would otherwise miss this phase and wait for the next but one.
        thread_barrier()
        mbarrier.arrive(shared.empty.index(ring.stage), count=1)
        ring = advance(ring, STAGES)
    return ring


@gluon.jit
def gradient_factors(end, gamma, head, scalars, CONFIG: gl.constexpr):
    """Factors of the sums: C of dV, and p C (times `scale`, if scores are scaled) of dK and dQ.

    With GRAD_SCALED, dO contains C already, and C is 1 here.
    """
    factor = 1.0
    # Without GRAD_SCALED all rows see `end` keys, so C is one number.
    if not CONFIG.GRAD_SCALED:
        n = end.to(gl.float32)
        exponent = -scalars.length_exponent
        factor = scalars.unit * gl.exp2(exponent * gl.log2(gl.maximum(n, 1.0) * 0.5))
        if gamma is not None:
            factor = factor / gl.load(gamma + head).to(gl.float32)
        # A row that sees no key has no weights.
        factor = gl.where(n > 0, factor, 0.0)
    # d(x^p) = p x^(p-1) dx; the kernels compute x^(p-1) without the factor p.
    slope = factor * CONFIG.POWER
    if CONFIG.SCALE_SCORES:
        slope = slope * scalars.scale
    return factor, slope


@gluon.jit
def write_query_gradient(
    acc, row_shift, dq, batch, head, row, end, pointers, buffer, sizes, scalars,
    CONFIG: gl.constexpr,
):  # fmt: skip
    """Scale and store dQ [ROWS, D] of a consumer through `buffer`, and sums of dS if wanted.

    `row_shift` [ROWS] has the layout of a row of scores.
    """
    _, slope = gradient_factors(end, pointers.gamma, head, scalars, CONFIG)
    if pointers.row_shift is not None:
        rows = row + gl.arange(0, CONFIG.ROWS, row_shift.type.layout)
        # `slope` contains the derivative of a score by its product, `scale`; a shift has none.
        sums = row_shift * (slope / scalars.scale)
        places = pointers.row_shift + (batch * sizes.heads + head).to(gl.int64) * sizes.n_q + rows
        gl.store(places, sums, mask=rows < sizes.n_q)
    store_tile(acc * slope, dq, buffer, batch, head, row)
