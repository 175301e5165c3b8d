"""Device functions that the forward and the backward kernels share.

They cover the work list of a persistent CTA, the rings of shared-memory buffers, scores and masks,
and the store of an output tile.

All partitions of warps of a CTA walk the same work list: tile number `step` of the CTA is a query
tile (forward, dQ) or a key tile (dK/dV) of one head. Everything that depends on the step is
computed from `step` inside the loop. Triton 3.6 was seen to lose the update of a loop bound that
one iteration left to the next, which made a kernel deadlock.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from reluformer.ops.backends.triton.versions import thread_barrier, tma_store


class Ring(NamedTuple):
    """Position in a ring of buffers: the stage, and the phase to wait for on its barrier."""

    stage: Any
    phase: Any


class Bounds(NamedTuple):
    """Limits of the keys that the query rows of a tile see."""

    row: Any
    """First query row of the tile."""
    offset: Any
    """n_k - n_q: with causality, query i sees the keys up to i + offset."""
    end: Any
    """Number of keys that exist."""


@gluon.jit
def tile_count(items, PAIRED: gl.constexpr):
    """Number of tiles that this CTA processes."""
    programs = gl.num_programs(0)
    # CTA i processes the items i, i + programs, i + 2 * programs, ...
    count = (items - gl.program_id(0) + programs - 1) // programs
    if PAIRED:
        count *= 2
    return count


@gluon.jit
def tile_coordinates(step, sizes, PAIRED: gl.constexpr):
    """(batch, head, tile of the head) of tile number `step` of this CTA.

    With causality the work of a tile grows or shrinks along the sequence. `PAIRED` items therefore
    join a long and a short tile of a head, so that all items take equally long. An odd number of
    tiles is filled up with a tile that has no rows. `sizes` has the scalars `items`, `heads` and
    `tiles` (per head).
    """
    programs = gl.num_programs(0)
    # Steps past the last item repeat it: the producer loads ahead, and nothing is stored.
    if PAIRED:
        item = gl.minimum(gl.program_id(0) + step // 2 * programs, sizes.items - 1)
        pairs = (sizes.tiles + 1) // 2
        # Heads are numbered through the batch: b * heads + h.
        batch_head = item // pairs
        short = item % pairs
        # A tile from the end of the sequence, then one from its start.
        tile = gl.where(step % 2 == 0, 2 * pairs - 1 - short, short)
    else:
        item = gl.minimum(gl.program_id(0) + step * programs, sizes.items - 1)
        batch_head = item // sizes.tiles
        tile = item % sizes.tiles
    return batch_head // sizes.heads, batch_head % sizes.heads, tile


@gluon.jit
def key_end(lengths, batch, n_k):
    """Number of keys that exist in a sequence of the batch."""
    end = n_k
    if lengths is not None:
        # As `valid_keys` of the portable kernels: an int64 length may exceed 2^31.
        end = gl.minimum(gl.maximum(gl.load(lengths + batch), 0), n_k).to(gl.int32)
    return end


@gluon.jit
def key_tile_counts(
    row, n_q, n_k, end, ROWS: gl.constexpr, KEYS: gl.constexpr, CAUSAL: gl.constexpr,
    MASK_TAIL: gl.constexpr,
):  # fmt: skip
    """(key tiles that query rows [row, row + ROWS) see, at least 1; how many need no mask)."""
    high = end
    # Without MASK_TAIL, TMA's zeros past the end give weight 0.
    unmasked = end // KEYS if MASK_TAIL else (end + KEYS - 1) // KEYS
    if CAUSAL:
        offset = n_k - n_q
        # The last row sees the most keys, the first row the fewest.
        high = gl.minimum(high, gl.maximum(gl.minimum(row + ROWS, n_q) + offset, 0))
        unmasked = gl.minimum(unmasked, gl.maximum(row + offset + 1, 0) // KEYS)
    # A tile of rows past the end sees no key, but its loop still runs once.
    count = gl.where(row < n_q, (high + KEYS - 1) // KEYS, 0)
    return gl.maximum(count, 1), gl.minimum(unmasked, count)


@gluon.jit
def advance(ring, STAGES: gl.constexpr):
    """The next position in a ring; the phase flips when the ring wraps around."""
    wrap = ring.stage + 1 == STAGES
    return Ring(gl.where(wrap, 0, ring.stage + 1), gl.where(wrap, ring.phase ^ 1, ring.phase))


@gluon.jit
def release_loaded(empty):
    """Arrive on `empty` for a buffer that has been loaded into registers.

    The loads may still be under way after a plain barrier, and the zeros that TMA writes for rows
    past the end of a tensor arrive at once. Without the fence 3 runs of 100 were wrong.
    """
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(empty, count=1)


@gluon.jit
def end_block(x):
    """End a basic block of the assembler; x is any scalar that is not negative.

    ptxas moves arithmetic behind the next wait for products, where no product hides it, and between
    the instructions of a product, which it delays. It does neither across basic blocks. The branch
    of this empty loop is never taken.
    """
    gl.inline_asm_elementwise(
        """{
        .reg .pred done;
        again:
        setp.ge.s32 done, $1, 0;
        @done bra end;
        nanosleep.u32 32;
        bra again;
        end:
        mov.b32 $0, $1;
        }""",
        "=r,r", [x], gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def opaque(x):
    """A copy of the scalar x that the assembler cannot identify with x.

    ptxas of CUDA 12.8, which Triton 3.6 ships, reuses the operand addresses of one loop in the loop
    after it, even on paths where the first loop ran no iteration and never computed them.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def zero_padding(tile, buffer, col, end, KEYS: gl.constexpr, D: gl.constexpr):
    """Copy a K or V tile [KEYS, D] to a buffer of the consumer, with zeros from key `end` on.

    Padding may hold NaN, and 0 * NaN is NaN. `col` is the first key of the tile.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    keys = col + gl.arange(0, KEYS, gl.SliceLayout(1, layout))  # [KEYS]
    x = tile.load(layout)  # [KEYS, D]
    zeros = gl.zeros([KEYS, D], x.dtype, layout)
    copy = buffer.slice(0, KEYS, dim=0)
    copy.store(gl.where((keys < end)[:, None], x, zeros))
    # The tensor cores read the copy through the async proxy.
    fence_async_shared()
    thread_barrier()
    return copy


@gluon.jit
def store_tile(x, target, buffer, batch, head, row):
    """Store x [ROWS, D] as bfloat16 to rows `row ..` of `target` with TMA, through `buffer`.

    `buffer` [1, 1, rows, D] may have more rows than x.
    """
    # The previous store must have read the buffer. Only thread 0 can wait for it.
    tma.store_wait(0)
    thread_barrier()
    whole = buffer.reshape([buffer.shape[2], x.shape[1]])
    whole.slice(0, x.shape[0], dim=0).store(x.to(gl.bfloat16))  # [ROWS, D]
    fence_async_shared()
    thread_barrier()
    tma_store(target, [batch, head, row, 0], buffer.slice(0, x.shape[0], dim=2))


@gluon.jit
def scaled_threshold(threshold, scalars, head, SCALE_SCORES: gl.constexpr):
    """Threshold of a head, in units of the scores that the kernel compares it with."""
    value = scalars.threshold
    if threshold is not None:
        value = gl.load(threshold + head).to(gl.float32)
    # Without SCALE_SCORES the threshold is in units of q k, before the scale.
    if not SCALE_SCORES:
        value = value / scalars.scale
    return value


@gluon.jit
def shift_scores(s, threshold, scale, CONFIG: gl.constexpr):
    """Products q k, multiplied by `scale` with SCALE_SCORES, minus the threshold; any shape."""
    if CONFIG.SCALE_SCORES:
        s = s * scale
    if CONFIG.HAS_THRESHOLD:
        s = s - threshold
    return s


@gluon.jit
def mask_keys(x, bounds, col, CAUSAL: gl.constexpr):
    """x [queries, keys from `col` on], or 0 where the key does not exist or is not visible."""
    layout: gl.constexpr = x.type.layout
    cols = gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))  # [COLS]
    if CAUSAL:
        # One bound per row, relative to the tile: the columns are then constants of a thread.
        rows = gl.arange(0, x.shape[0], gl.SliceLayout(1, layout))
        ends = gl.minimum(bounds.row + bounds.offset + 1 + rows, bounds.end) - col  # [ROWS]
        visible = cols[None, :] < ends[:, None]  # [ROWS, COLS]
    else:
        visible = (cols < bounds.end - col)[None, :]  # [1, COLS]
    return gl.where(visible, x, 0.0)


@gluon.jit
def split_columns(x):
    """(left, right) half of the columns of x [ROWS, COLS]; each [ROWS, COLS / 2]."""
    ROWS: gl.constexpr = x.shape[0]
    COLS: gl.constexpr = x.shape[1]
    # Triton splits along the last dimension, so the halves are moved there.
    return gl.split(gl.permute(gl.reshape(x, [ROWS, 2, COLS // 2]), (0, 2, 1)))
