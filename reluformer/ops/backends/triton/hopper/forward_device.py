"""Device functions of the forward kernel besides its consumers: work list, producer, row factors.

`forward.py` describes the kernel.
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
    tile_coordinates,
    tile_count,
)
from reluformer.ops.backends.triton.portable.packed_schedule import FIELDS
from reluformer.ops.backends.triton.versions import thread_barrier, tma_load


class ForwardSizes(NamedTuple):
    """Extent of the work, in scalars."""

    items: Any
    """Work items of all CTAs: tiles or, if they are paired, pairs of tiles."""
    heads: Any
    """Heads of the tensor whose tiles are the work."""
    tiles: Any
    """Tiles per head, of CONSUMERS * ROWS rows each."""
    n_q: Any
    """Queries of a sequence."""
    n_k: Any
    """Keys of a sequence."""


class ForwardShared(NamedTuple):
    """Buffers and barriers in shared memory."""

    q: Any
    k: Any
    v: Any
    out: Any
    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any


class WorkTile(NamedTuple):
    """A query tile: where it lies and which keys exist for it."""

    batch: Any
    head: Any
    tile: Any
    """Number of the tile in its sequence."""
    first_q: Any
    """First query row of the sequence in its tensor; 0 unless packed."""
    first_k: Any
    """First key of the sequence in its tensor; 0 unless packed."""
    n_q: Any
    n_k: Any
    end: Any
    """Number of keys that exist."""


@gluon.jit
def locate_tile(step, sizes, lengths, work, PAIRED: gl.constexpr):
    """The WorkTile number `step` of this CTA; `work` lists the tiles of packed sequences."""
    if work is None:
        batch, head, tile = tile_coordinates(step, sizes, PAIRED)
        first_q = 0
        first_k = 0
        n_q = sizes.n_q
        n_k = sizes.n_k
    else:
        # The list has one entry per item; both tiles of a pair have the same entry.
        index = step // 2 if PAIRED else step
        item = gl.program_id(0) + index * gl.num_programs(0)
        # Steps past the last item repeat it; an empty list has no item 0, but room for one.
        item = gl.maximum(gl.minimum(item, sizes.items - 1), 0)
        batch = item * 0
        entry = work + 1 + item // sizes.heads * FIELDS
        # The tiles of a head are neighbours, since they read the same keys.
        count = gl.load(entry + 1)
        in_sequence = item - gl.load(entry) * sizes.heads
        head = in_sequence // count
        tile = in_sequence % count
        if PAIRED:
            tile = gl.where(step % 2 == 0, 2 * count - 1 - tile, tile)
        first_q = gl.load(entry + 2)
        first_k = gl.load(entry + 3)
        # Lengths of this sequence; `sizes` holds the longest ones.
        n_q = gl.load(entry + 4)
        n_k = gl.load(entry + 5)
    end = key_end(lengths, batch, n_k)
    return WorkTile(batch, head, tile, first_q, first_k, n_q, n_k, end)


@gluon.jit
def allocate_shared(q, k, v, out, Q_TILES: gl.constexpr, CONFIG: gl.constexpr):
    """Allocate the buffers, allocate and initialise the barriers."""
    q_bufs = gl.allocate_shared_memory(q.dtype, [Q_TILES, 1, 1, CONFIG.ROWS, CONFIG.D], q.layout)
    # An output buffer may have to hold a V tile.
    O_ROWS: gl.constexpr = CONFIG.ROWS if CONFIG.ROWS > CONFIG.KEYS else CONFIG.KEYS
    o_bufs = gl.allocate_shared_memory(
        q.dtype, [CONFIG.CONSUMERS, 1, 1, O_ROWS, CONFIG.D], out.layout
    )
    k_bufs = gl.allocate_shared_memory(
        q.dtype, [CONFIG.STAGES, 1, 1, CONFIG.KEYS, CONFIG.D], k.layout
    )
    v_bufs = gl.allocate_shared_memory(
        q.dtype, [CONFIG.STAGES, 1, 1, CONFIG.KEYS, CONFIG.D], v.layout
    )
    # One pair of barriers per buffer.
    bar_layout: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [Q_TILES, 1], bar_layout)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_TILES, 1], bar_layout)
    k_full = gl.allocate_shared_memory(gl.int64, [CONFIG.STAGES, 1], bar_layout)
    k_empty = gl.allocate_shared_memory(gl.int64, [CONFIG.STAGES, 1], bar_layout)
    v_full = gl.allocate_shared_memory(gl.int64, [CONFIG.STAGES, 1], bar_layout)
    v_empty = gl.allocate_shared_memory(gl.int64, [CONFIG.STAGES, 1], bar_layout)
    for i in gl.static_range(Q_TILES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(CONFIG.STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        # All consumers read each K and V tile.
        mbarrier.init(k_empty.index(i), count=CONFIG.CONSUMERS)
        mbarrier.init(v_empty.index(i), count=CONFIG.CONSUMERS)
    return ForwardShared(
        q_bufs, k_bufs, v_bufs, o_bufs, q_full, q_empty, k_full, k_empty, v_full, v_empty
    )


@gluon.jit
def forward_producer(
    q, k, v, lengths, work, shared, sizes, Q_BUFFERS: gl.constexpr, CONFIG: gl.constexpr
):
    """Load Q of each query tile, then stream its K and V tiles.

    Consumers start the scores of the next tile before they finish a tile, also after the last one.
    Therefore one more Q and one more K tile are loaded at the end.
    """
    steps = tile_count(sizes.items, CONFIG.CAUSAL)
    # Phase 1: the first wait for each buffer passes.
    k_ring = Ring(0, 1)
    v_ring = Ring(0, 1)
    q_ring = Ring(0, 1)
    for step in range(0, steps + 1):
        work_tile = locate_tile(step, sizes, lengths, work, CONFIG.CAUSAL)
        batch, head, tile, first_q, first_k, n_q, n_k, end = work_tile
        row = tile * (CONFIG.CONSUMERS * CONFIG.ROWS)
        # Key tiles that the rows of any consumer see.
        count, _ = key_tile_counts(
            row, n_q, n_k, end, CONFIG.CONSUMERS * CONFIG.ROWS, CONFIG.KEYS, CONFIG.CAUSAL,
            CONFIG.MASK_TAIL,
        )  # fmt: skip
        # After the last tile, one K tile.
        is_work = step < steps
        count = gl.where(is_work, count, 1)
        # Q of all consumers, each with a barrier of its own.
        for consumer in gl.static_range(CONFIG.CONSUMERS):
            place = q_ring.stage * CONFIG.CONSUMERS + consumer
            mbarrier.wait(shared.q_empty.index(place), q_ring.phase)
            bar = shared.q_full.index(place)
            mbarrier.expect(bar, CONFIG.ROWS * CONFIG.D * 2)
            tma_load(
                q, [batch, head, first_q + row + consumer * CONFIG.ROWS, 0], bar,
                shared.q.index(place),
            )  # fmt: skip
        q_ring = advance(q_ring, Q_BUFFERS)
        for j in range(0, count):
            mbarrier.wait(shared.k_empty.index(k_ring.stage), k_ring.phase)
            bar = shared.k_full.index(k_ring.stage)
            mbarrier.expect(bar, CONFIG.KEYS * CONFIG.D * 2)
            tma_load(
                k, [batch, head // CONFIG.GROUP, first_k + j * CONFIG.KEYS, 0], bar,
                shared.k.index(k_ring.stage),
            )  # fmt: skip
            k_ring = advance(k_ring, CONFIG.STAGES)
            # V in a ring of its own: a K tile is released one product earlier.
            if is_work:
                mbarrier.wait(shared.v_empty.index(v_ring.stage), v_ring.phase)
                bar = shared.v_full.index(v_ring.stage)
                mbarrier.expect(bar, CONFIG.KEYS * CONFIG.D * 2)
                tma_load(
                    v, [batch, head // CONFIG.GROUP, first_k + j * CONFIG.KEYS, 0], bar,
                    shared.v.index(v_ring.stage),
                )  # fmt: skip
                v_ring = advance(v_ring, CONFIG.STAGES)


@gluon.jit
def release_unread_keys(shared, k_ring, v_ring, low, high, STAGES: gl.constexpr):
    """Release key tiles [low, high), which only other consumers need: the rings after them."""
    for _ in range(low, high):
        mbarrier.wait(shared.k_full.index(k_ring.stage), k_ring.phase)
        mbarrier.wait(shared.v_full.index(v_ring.stage), v_ring.phase)
        # A warp that is late would otherwise miss this phase and wait for the next but one.
        thread_barrier()
        mbarrier.arrive(shared.k_empty.index(k_ring.stage), count=1)
        mbarrier.arrive(shared.v_empty.index(v_ring.stage), count=1)
        k_ring = advance(k_ring, STAGES)
        v_ring = advance(v_ring, STAGES)
    return k_ring, v_ring


@gluon.jit
def row_factor(row, work_tile, scalars, gamma, CONFIG: gl.constexpr):
    """C_i = unit / (gamma_h * (n_i / 2)^length_exponent), 0 for rows that see no key: [ROWS]."""
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.D, 16])
    n_q = work_tile.n_q
    n_k = work_tile.n_k
    rows = gl.arange(0, CONFIG.ROWS, gl.SliceLayout(1, o_layout))
    # Query i sees keys up to i + n_k - n_q.
    visible = row + n_k - n_q + 1 + rows
    if not CONFIG.CAUSAL:
        visible = visible * 0 + n_k
    n = gl.minimum(gl.maximum(visible, 0), work_tile.end).to(gl.float32)  # [ROWS]
    # (n / 2)^-exponent as a power of 2; n = 1 keeps the logarithm finite.
    exponent = -scalars.length_exponent
    factor = scalars.unit * gl.exp2(exponent * gl.log2(gl.maximum(n, 1.0) * 0.5))
    if gamma is not None:
        factor = factor / gl.load(gamma + work_tile.head).to(gl.float32)
    return gl.where(n > 0, factor, 0.0)


@gluon.jit
def store_rows(x, out, strides, work_tile, row):
    """Store the rows of x [ROWS, D] that belong to the packed sequence, by pointer."""
    layout: gl.constexpr = x.type.layout
    rows = row + gl.arange(0, x.shape[0], gl.SliceLayout(1, layout))
    cols = gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))
    # [ROWS, D]
    places = (work_tile.first_q + rows).to(gl.int64)[:, None] * strides[1] + cols[None, :]
    # Offsets can exceed 2^31 elements.
    first = out + work_tile.head.to(gl.int64) * strides[0]
    gl.store(first + places, x, mask=(rows < work_tile.n_q)[:, None])
