"""What the two backward kernels with specialised warps share; the formulas are in
`backward_keys.py`, the way such a kernel works in `specialised.py`.

A program owns rows of two operands and walks tiles of the two others, which come in pairs:

    keys     owns K and V, walks Q and dO:  S' = K Q', dP' = V dO', dV += P' dO, dK += dS' Q
    queries  owns Q and dO, walks K and V:  S = Q K',  dP = dO V',  dQ += dS K

dO has been multiplied by the factor of its row where that differs between rows, and so have the
terms that gradients of row sums add to dP. A consumer has the weights and slopes of a tile in
registers, multiplies with them and makes those of the next tile meanwhile. Between the turns of a
loop no product is under way: the assembler would make all of them wait for each other.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from reluformer.ops.backends.triton.hopper.device import (
    CONSUMERS,
    key_end,
    key_tiles,
    next_stage,
    place_of,
    turns_of,
)


@gluon.jit
def query_tiles(
    base, key, n_q, n_k, end, ROWS: gl.constexpr, SIDE: gl.constexpr, CAUSAL: gl.constexpr
):
    """First and last (exclusive) tile of queries that keys [key, key + ROWS) meet, at least one,
    and the tile from which on all of them are seen.

    `base` is the first key of the turn: of keys that do not exist both consumers meet one tile.
    """
    high = (n_q + SIDE - 1) // SIDE
    low = key * 0
    edge = key * 0
    if CAUSAL:
        offset = n_k - n_q
        low = gl.minimum(gl.maximum(key - offset, 0) // SIDE, high - 1)
        edge = (gl.maximum(key + ROWS - 1 - offset, 0) + SIDE - 1) // SIDE
    return gl.where(base < end, low, high - 1), high, edge


@gluon.jit
def barriers_of(PLACES: gl.constexpr, READERS: gl.constexpr):
    """Two for each of so many buffers: full when a copy has arrived, empty when so many groups of
    warps have read it. A fence and a barrier must follow."""
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [PLACES, 1], layout)
    empty = gl.allocate_shared_memory(gl.int64, [PLACES, 1], layout)
    for i in gl.static_range(PLACES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return full, empty


@gluon.jit
def producer(
    own_first, own_second, first, second, lengths, buffers, barriers, items, heads, tiles, n_q, n_k,
    GROUP: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, SIDE: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, OF_KEYS: gl.constexpr, ALONE: gl.constexpr,
):  # fmt: skip
    """Load what each turn owns and the tiles that it walks; after the last turn one of each, with
    which consumers begin a next turn. `ALONE`: the second of what is owned has no first."""
    own_first_bufs, own_second_bufs, first_bufs, second_bufs = buffers
    own_full, own_empty, full, empty = barriers
    own_bytes: gl.constexpr = ROWS * D * (2 if ALONE else 4)
    turns = turns_of(items, CAUSAL)
    own_phase = 1
    at = 0
    phase = 1
    for turn in range(0, turns + 1):
        b, h, tile = place_of(turn, items, heads, tiles, CAUSAL)
        row = tile * (CONSUMERS * ROWS)
        end = key_end(lengths, b, n_k)
        low = row * 0
        if OF_KEYS:
            low, high, _ = query_tiles(row, row, n_q, n_k, end, CONSUMERS * ROWS, SIDE, CAUSAL)
        else:
            high, _ = key_tiles(row, n_q, n_k, end, CONSUMERS * ROWS, SIDE, CAUSAL, True)
        members = gl.where(turn < turns, GROUP if OF_KEYS else 1, 1)
        high = gl.where(turn < turns, high, low + 1)
        for part in gl.static_range(CONSUMERS):
            at_row = row + part * ROWS
            mbarrier.wait(own_empty.index(part), own_phase)
            bar = own_full.index(part)
            mbarrier.expect(bar, own_bytes)
            if not ALONE:
                tma.async_copy_global_to_shared(
                    own_first, [b, h, at_row, 0], bar, own_first_bufs.index(part)
                )
            tma.async_copy_global_to_shared(
                own_second, [b, h, at_row, 0], bar, own_second_bufs.index(part)
            )
        own_phase ^= 1
        for member in range(0, members):
            head = h * GROUP + member if OF_KEYS else h // GROUP
            for t in range(low, high):
                mbarrier.wait(empty.index(at), phase)
                bar = full.index(at)
                mbarrier.expect(bar, SIDE * D * 4)
                tma.async_copy_global_to_shared(
                    first, [b, head, t * SIDE, 0], bar, first_bufs.index(at)
                )
                tma.async_copy_global_to_shared(
                    second, [b, head, t * SIDE, 0], bar, second_bufs.index(at)
                )
                at, phase = next_stage(at, phase, STAGES)


@gluon.jit
def owned(
    bufs, place, ROWS: gl.constexpr, D: gl.constexpr, IN_REGISTERS: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """An operand that a consumer owns, [ROWS, D]: in registers, or where it lies."""
    tile = bufs.index(place).reshape([ROWS, D])
    if IN_REGISTERS:
        tile = tile.load(LAYOUT)
    return tile


@gluon.jit
def skipped(full, empty, at, phase, count, STAGES: gl.constexpr):
    """Give tiles that only the other consumer needs back unread, in order: the place after."""
    for _ in range(0, count):
        mbarrier.wait(full.index(at), phase)
        # Not before all warps have seen this phase: a late one would wait for the next but one.
        gl.thread_barrier()
        mbarrier.arrive(empty.index(at), count=1)
        at, phase = next_stage(at, phase, STAGES)
    return at, phase


@gluon.jit
def out_factor(
    end, unit, gamma, h, length_exponent, scale, ROW_SCALE: gl.constexpr, POWER: gl.constexpr,
    PRESCALE: gl.constexpr,
):  # fmt: skip
    """What gradients of values, and of keys and queries, are multiplied by at last: C, unless dO
    has been (`ROW_SCALE`), and p C."""
    factor = 1.0
    if not ROW_SCALE:
        n = end.to(gl.float32)
        factor = unit * gl.exp2(-length_exponent * gl.log2(gl.maximum(n, 1.0) * 0.5))
        if gamma is not None:
            factor = factor / gl.load(gamma + h).to(gl.float32)
        factor = gl.where(n > 0, factor, 0.0)
    slope = factor * POWER
    if PRESCALE:
        slope = slope * scale
    return factor, slope
