"""What the kernels with specialised warps share: their list of work, rings of buffers, addresses.

A program's work is a list of turns, one for each tile that it owns: all of its warps make the same
list. What a turn needs is computed in the turn: Triton 3.6 was seen to lose the update of a number
that one turn left to the next (the bound of a loop), and a kernel waited for ever.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

CONSUMERS = gl.constexpr(2)


@gluon.jit
def turns_of(items, PAIRED: gl.constexpr):
    """How many tiles this program works on."""
    programs = gl.num_programs(0)
    turns = (items - gl.program_id(0) + programs - 1) // programs
    if PAIRED:
        turns *= 2
    return turns


@gluon.jit
def place_of(turn, items, heads, tiles, PAIRED: gl.constexpr):
    """Batch, head and tile of a turn.

    An item is a tile, or a pair of a long and a short one of a head, where rows see more keys the
    later they come: pairs are equally long. An odd number of tiles gets one of no rows.
    """
    programs = gl.num_programs(0)
    if PAIRED:
        item = gl.minimum(gl.program_id(0) + turn // 2 * programs, items - 1)
        pairs = (tiles + 1) // 2
        bh = item // pairs
        short = item % pairs
        tile = gl.where(turn % 2 == 0, 2 * pairs - 1 - short, short)
    else:
        item = gl.minimum(gl.program_id(0) + turn * programs, items - 1)
        bh = item // tiles
        tile = item % tiles
    return bh // heads, bh % heads, tile


@gluon.jit
def key_end(lengths, b, n_k):
    """How many keys of a batch exist."""
    end = n_k
    if lengths is not None:
        end = gl.minimum(gl.maximum(gl.load(lengths + b).to(gl.int32), 0), n_k)
    return end


@gluon.jit
def key_tiles(
    row, n_q, n_k, end, ROWS: gl.constexpr, KEYS: gl.constexpr, CAUSAL: gl.constexpr,
    TAIL: gl.constexpr,
):  # fmt: skip
    """Key tiles that rows [row, row + ROWS) meet, at least one; how many of them need no mask."""
    high = end
    whole = end // KEYS if TAIL else (end + KEYS - 1) // KEYS
    if CAUSAL:
        offset = n_k - n_q
        high = gl.minimum(high, gl.maximum(gl.minimum(row + ROWS, n_q) + offset, 0))
        whole = gl.minimum(whole, gl.maximum(row + offset + 1, 0) // KEYS)
    count = gl.where(row < n_q, (high + KEYS - 1) // KEYS, 0)
    return gl.maximum(count, 1), gl.minimum(whole, count)


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The next place in a ring and its phase."""
    wrap = stage + 1 == STAGES
    return gl.where(wrap, 0, stage + 1), gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def give_back(empty):
    """Say that a buffer has been read into registers.

    Such reads may still be under way when a barrier is over, and zeros for rows past the end of a
    tensor come at once: seen in three runs of a hundred.
    """
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(empty, count=1)


@gluon.jit
def opaque(x):
    """The same number, of which the assembler does not know that it is the same.

    It keeps addresses of a loop's operands for the loop after it even where the first ran no turn
    and never made them (CUDA 12.8's, which Triton 3.6 brings).
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def clean(values, spare, col, end, KEYS: gl.constexpr, D: gl.constexpr):
    """A copy of a value tile in a buffer of the consumer's own, zeros from key `end` on: what
    padding holds may be NaN, and 0 * NaN is NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    rows = col + gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    tile = values.load(layout)
    zeros = gl.zeros([KEYS, D], tile.dtype, layout)
    copy = spare.slice(0, KEYS, dim=0)
    copy.store(gl.where((rows < end)[:, None], tile, zeros))
    fence_async_shared()
    gl.thread_barrier()
    return copy


@gluon.jit
def stored(out, target, buf, b, h, row, ROWS: gl.constexpr, D: gl.constexpr):
    """Send [ROWS, D] to memory, through a buffer whose last content must have been read."""
    # Thread 0 knows, the others wait for it.
    tma.store_wait(0)
    gl.thread_barrier()
    buf.reshape([ROWS, D]).store(out.to(gl.bfloat16))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(target, [b, h, row, 0], buf)


@gluon.jit
def cut_of(threshold, threshold_value, scale, h, PRESCALE: gl.constexpr):
    """The threshold of a head in units of the scores that products give."""
    cut = threshold_value
    if threshold is not None:
        cut = gl.load(threshold + h).to(gl.float32)
    if not PRESCALE:
        cut = cut / scale
    return cut


@gluon.jit
def shifted(s, cut, scale, HAS_THRESHOLD: gl.constexpr, PRESCALE: gl.constexpr):
    """Scores, scaled if their powers ask for it, less the threshold."""
    if PRESCALE:
        s = s * scale
    if HAS_THRESHOLD:
        s = s - cut
    return s


@gluon.jit
def seen(x, row, col, offset, end, CAUSAL: gl.constexpr, LAYOUT: gl.constexpr):
    """x [queries, keys], or 0 where a key does not exist or lies behind a query."""
    cols = col + gl.arange(0, x.shape[1], gl.SliceLayout(0, LAYOUT))
    visible = (cols < end)[None, :]
    if CAUSAL:
        rows = row + offset + gl.arange(0, x.shape[0], gl.SliceLayout(1, LAYOUT))
        visible = visible & (cols[None, :] <= rows[:, None])
    return gl.where(visible, x, 0.0)


@gluon.jit
def halves(x, ROWS: gl.constexpr, COLS: gl.constexpr):
    """Left and right half of the columns."""
    return gl.split(gl.permute(gl.reshape(x, [ROWS, 2, COLS // 2]), (0, 2, 1)))
