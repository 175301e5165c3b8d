"""Forward kernel for Hopper in Gluon: what `forward.py` computes, with specialised warps.

A program stays on its multiprocessor and works through a list of query tiles. One warp, the
producer, loads: queries of a tile, then its keys and values, tile after tile into two rings of
buffers, running ahead into the next tile of queries. Two groups of four warps, the consumers, own
half of the rows of a tile each. A consumer starts the scores of key tile j + 1, then the product of
tile j's weights and values, and makes weights of the new scores while that product runs. So neither
loads nor stores nor weights keep the tensor cores waiting.

A buffer has two barriers: `full` (its copy has arrived) and `empty` (its readers are through). A
barrier has a phase that turns over each time; who waits names the phase that must be over.
`tests/ops/backends/triton/hopper/test_forward.py` runs this protocol in slow motion.
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

from reluformer.ops.backends.triton.hopper.device import (
    CONSUMERS,
    clean,
    cut_of,
    give_back,
    key_end,
    key_tiles,
    next_stage,
    opaque,
    place_of,
    stored,
    turns_of,
)
from reluformer.ops.backends.triton.hopper.weights import even_sums, log_sums, row_sums, weights_of
from reluformer.ops.backends.triton.portable.device import BLOCK, LN2
from reluformer.ops.backends.triton.portable.packed_schedule import FIELDS


@gluon.jit
def _place(turn, items, heads, tiles, work, lengths, q_length, k_length, PAIRED: gl.constexpr):
    """(batch index, head, tile, first query and key row, Tq, Tk, keys that exist) of a turn.

    `work` lists the tiles of packed sequences: `schedule.py`.
    """
    if work is None:
        batch, h, tile = place_of(turn, items, heads, tiles, PAIRED)
        first_q = 0
        first_k = 0
        n_q = q_length
        n_k = k_length
    else:
        at = turn // 2 if PAIRED else turn
        item = gl.program_id(0) + at * gl.num_programs(0)
        item = gl.maximum(gl.minimum(item, items - 1), 0)
        batch = item * 0
        entry = work + 1 + item // heads * FIELDS
        # Of a sequence one head comes after the other, for they have keys of their own.
        count = gl.load(entry + 1)
        of_sequence = item - gl.load(entry) * heads
        h = of_sequence // count
        tile = of_sequence % count
        if PAIRED:
            tile = gl.where(turn % 2 == 0, 2 * count - 1 - tile, tile)
        first_q = gl.load(entry + 2)
        first_k = gl.load(entry + 3)
        n_q = gl.load(entry + 4)
        n_k = gl.load(entry + 5)
    return batch, h, tile, first_q, first_k, n_q, n_k, key_end(lengths, batch, n_k)


@gluon.jit
def _producer(
    q, k, v, lengths, work, buffers, barriers, items, heads, tiles, q_length, k_length,
    GROUP: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr, Q_PLACES: gl.constexpr, CAUSAL: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """Load queries of each tile, then its keys and values; after the last, a tile's Q and K_0."""
    q_bufs, k_bufs, v_bufs = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    turns = turns_of(items, CAUSAL)
    k_at = 0
    k_phase = 1
    v_at = 0
    v_phase = 1
    q_at = 0
    q_phase = 1
    for turn in range(0, turns + 1):
        batch, h, tile, first_q, first_k, n_q, n_k, end = _place(
            turn, items, heads, tiles, work, lengths, q_length, k_length, CAUSAL
        )
        row = tile * (CONSUMERS * ROWS)
        count, _ = key_tiles(row, n_q, n_k, end, CONSUMERS * ROWS, KEYS, CAUSAL, TAIL)
        # Consumers begin the next tile's scores before they end a tile, the last one's too.
        real = turn < turns
        count = gl.where(real, count, 1)
        for part in gl.static_range(CONSUMERS):
            place = q_at * CONSUMERS + part
            mbarrier.wait(q_empty.index(place), q_phase)
            bar = q_full.index(place)
            mbarrier.expect(bar, ROWS * D * 2)
            tma.async_copy_global_to_shared(
                q, [batch, h, first_q + row + part * ROWS, 0], bar, q_bufs.index(place)
            )
        q_at, q_phase = next_stage(q_at, q_phase, Q_PLACES)
        for j in range(0, count):
            mbarrier.wait(k_empty.index(k_at), k_phase)
            bar = k_full.index(k_at)
            mbarrier.expect(bar, KEYS * D * 2)
            tma.async_copy_global_to_shared(
                k, [batch, h // GROUP, first_k + j * KEYS, 0], bar, k_bufs.index(k_at)
            )
            k_at, k_phase = next_stage(k_at, k_phase, STAGES)
            if real:
                mbarrier.wait(v_empty.index(v_at), v_phase)
                bar = v_full.index(v_at)
                mbarrier.expect(bar, KEYS * D * 2)
                tma.async_copy_global_to_shared(
                    v, [batch, h // GROUP, first_k + j * KEYS, 0], bar, v_bufs.index(v_at)
                )
                v_at, v_phase = next_stage(v_at, v_phase, STAGES)


@gluon.jit
def _queries(
    q_bufs, q_full, q_empty, q_at, q_phase, part: gl.constexpr, ROWS: gl.constexpr,
    D: gl.constexpr, IN_REGISTERS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """A consumer's queries: in registers, and their buffer given back, or where they lie."""
    place = q_at * CONSUMERS + part
    mbarrier.wait(q_full.index(place), q_phase)
    tile = q_bufs.index(place).reshape([ROWS, D])
    if IN_REGISTERS:
        tile = tile.load(LAYOUT)
        give_back(q_empty.index(place))
    return tile


@gluon.jit
def _walk(
    acc, s, p, total, log_total, tile, k_bufs, v_bufs, k_full, k_empty, v_full, v_empty,
    k_at, k_phase, v_at, v_phase, low, high, row, offset, end, cut, scale,
    MASKED: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, POWER: gl.constexpr,
    HAS_THRESHOLD: gl.constexpr, PRESCALE: gl.constexpr, SUMS: gl.constexpr, LOGS: gl.constexpr,
    S_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Key tiles low .. high: their scores, and the values of the tiles one before."""
    for j in range(low, high):
        mbarrier.wait(k_full.index(k_at), k_phase)
        keys = k_bufs.index(k_at).reshape([KEYS, D]).permute((1, 0))
        s = warpgroup_mma(tile, keys, s, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(v_at), v_phase)
        values = v_bufs.index(v_at).reshape([KEYS, D])
        acc = warpgroup_mma(p, values, acc, use_acc=j > 1, is_async=True)
        s = warpgroup_mma_wait(1, [s])
        mbarrier.arrive(k_empty.index(k_at), count=1)
        k_at, k_phase = next_stage(k_at, k_phase, STAGES)
        packed = weights_of(
            s, row, j * KEYS, offset, end, cut, scale, MASKED, CAUSAL, POWER, HAS_THRESHOLD,
            PRESCALE, S_LAYOUT,
        )  # fmt: skip
        if SUMS:
            total += row_sums(packed, ROWS, KEYS)
        if LOGS:
            log_total += log_sums(packed, ROWS, KEYS)
            # Here, and again in the next turn: without it the assembler puts off the logarithms
            # until the product under way is over.
            mbarrier.wait(k_full.index(k_at), k_phase)
        # Not in the registers of the weights that the product under way reads.
        following = gl.convert_layout(packed, P_LAYOUT, assert_trivial=True)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(v_empty.index(v_at), count=1)
        v_at, v_phase = next_stage(v_at, v_phase, STAGES)
        p = following
    return acc, s, p, total, log_total, k_at, k_phase, v_at, v_phase


@gluon.jit
def _store_rows(
    rest, tile, h, first, row, n_q, stride_h, stride_t, D: gl.constexpr, ROWS: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Write the rows of a tile that belong to a packed sequence."""
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    places = (first + rows).to(gl.int64)[:, None] * stride_t + cols[None, :]
    gl.store(rest + h.to(gl.int64) * stride_h + places, tile, mask=(rows < n_q)[:, None])


@gluon.jit
def _row_factor(
    row, n_q, n_k, end, unit, gamma, h, length_exponent, ROWS: gl.constexpr,
    CAUSAL: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """C_i = unit / (gamma_h * (n_i / 2)^length_exponent), zero where nothing is seen: [ROWS]."""
    seen = row + n_k - n_q + 1 + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    if not CAUSAL:
        seen = seen * 0 + n_k
    n = gl.minimum(gl.maximum(seen, 0), end).to(gl.float32)
    factor = unit * gl.exp2(-length_exponent * gl.log2(gl.maximum(n, 1.0) * 0.5))
    if gamma is not None:
        factor = factor / gl.load(gamma + h).to(gl.float32)
    return gl.where(n > 0, factor, 0.0)


@gluon.jit
def _consumer(
    out, rest, row_sum, log_sum, gamma, threshold, lengths, work, buffers, o_bufs, barriers, items,
    heads, tiles, q_length, k_length, stride_oh, stride_ot, scale, unit, threshold_value,
    length_exponent, epsilon,
    part: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr, Q_PLACES: gl.constexpr, Q_REGISTERS: gl.constexpr,
    CAUSAL: gl.constexpr, TAIL: gl.constexpr, POWER: gl.constexpr,
    HAS_THRESHOLD: gl.constexpr, PRESCALE: gl.constexpr, SUMS: gl.constexpr,
    DIVIDE: gl.constexpr, EVERY: gl.constexpr,
):  # fmt: skip
    """Rows `part * ROWS ..` of every tile of queries."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    q_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, o_layout)
    LOGS: gl.constexpr = log_sum is not None
    q_bufs, k_bufs, v_bufs = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    spare = o_bufs.index(part)
    turns = turns_of(items, CAUSAL)
    k_at = 0
    k_phase = 0
    v_at = 0
    v_phase = 0
    q_at = 0
    q_phase = 0
    s = gl.zeros([ROWS, KEYS], gl.float32, s_layout)
    acc = gl.zeros([ROWS, D], gl.float32, o_layout)

    tile = _queries(q_bufs, q_full, q_empty, 0, 0, part, ROWS, D, Q_REGISTERS, q_layout)
    mbarrier.wait(k_full.index(0), 0)
    keys = k_bufs.index(0).reshape([KEYS, D]).permute((1, 0))
    s = warpgroup_mma(tile, keys, s, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, [s])
    for turn in range(0, turns):
        batch, h, index, first_q, first_k, n_q, n_k, end = _place(
            turn, items, heads, tiles, work, lengths, q_length, k_length, CAUSAL
        )
        row = index * (CONSUMERS * ROWS)
        offset = n_k - n_q
        # As `entropy_wanted` of the plain kernels says.
        wanted = (row // BLOCK + h + batch) % EVERY == 0
        count, _ = key_tiles(row, n_q, n_k, end, CONSUMERS * ROWS, KEYS, CAUSAL, TAIL)
        row += part * ROWS
        mine, whole = key_tiles(row, n_q, n_k, end, ROWS, KEYS, CAUSAL, TAIL)
        cut = cut_of(threshold, threshold_value, scale, h, PRESCALE)
        # Scores of the first tile are there.
        mbarrier.arrive(k_empty.index(k_at), count=1)
        k_at, k_phase = next_stage(k_at, k_phase, STAGES)
        packed = weights_of(
            s, row, 0, offset, end, cut, scale, CAUSAL or TAIL, CAUSAL, POWER, HAS_THRESHOLD,
            PRESCALE, s_layout,
        )  # fmt: skip
        total = 0.0
        if SUMS:
            total = row_sums(packed, ROWS, KEYS)
        log_total = 0.0
        if LOGS:
            log_total = even_sums(gl.zeros([ROWS, KEYS], gl.float32, s_layout), ROWS, KEYS)
            if wanted:
                log_total = log_sums(packed, ROWS, KEYS)
        p = gl.convert_layout(packed, p_layout, assert_trivial=True)
        # Tiles that need no mask, those that do, and with logarithms all.
        for loop in gl.static_range(3):
            if (
                (loop == 0 and not (LOGS and EVERY == 1))
                or (loop == 1 and (CAUSAL or TAIL) and not (LOGS and EVERY == 1))
                or (loop == 2 and LOGS)
            ):
                low = 1
                high = mine
                if loop == 0 and (CAUSAL or TAIL):
                    high = whole
                if loop == 1:
                    low = gl.maximum(whole, 1)
                if LOGS and EVERY > 1:
                    high = gl.where(wanted == (loop == 2), high, 0)
                if loop > 0 and not Q_REGISTERS:
                    tile = q_bufs.index(opaque(q_at) * CONSUMERS + part).reshape([ROWS, D])
                acc, s, p, total, log_total, k_at, k_phase, v_at, v_phase = _walk(
                    acc, s, p, total, log_total, tile, k_bufs, v_bufs, k_full, k_empty, v_full,
                    v_empty, k_at, k_phase, v_at, v_phase, low, high, row, offset, end, cut, scale,
                    loop > 0 and (CAUSAL or TAIL), D, ROWS, KEYS, STAGES, CAUSAL, POWER,
                    HAS_THRESHOLD, PRESCALE, SUMS, loop == 2, s_layout, p_layout,
                )  # fmt: skip
        if not Q_REGISTERS:
            mbarrier.arrive(q_empty.index(q_at * CONSUMERS + part), count=1)
        mbarrier.wait(v_full.index(v_at), v_phase)
        values = v_bufs.index(v_at).reshape([KEYS, D])
        if lengths is not None or work is not None:
            # The store of the tile before must have read the buffer: thread 0 knows.
            tma.store_wait(0)
            gl.thread_barrier()
            values = clean(values, spare.reshape([ROWS, D]), (mine - 1) * KEYS, end, KEYS, D)
        acc = warpgroup_mma(p, values, acc, use_acc=mine > 1, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(v_empty.index(v_at), count=1)
        v_at, v_phase = next_stage(v_at, v_phase, STAGES)
        # Tiles that only the other consumer needs: give them back unread, in order.
        for _ in range(mine, count):
            mbarrier.wait(k_full.index(k_at), k_phase)
            mbarrier.wait(v_full.index(v_at), v_phase)
            # Not before all warps have seen this phase: a late one would wait for the next but one.
            gl.thread_barrier()
            mbarrier.arrive(k_empty.index(k_at), count=1)
            mbarrier.arrive(v_empty.index(v_at), count=1)
            k_at, k_phase = next_stage(k_at, k_phase, STAGES)
            v_at, v_phase = next_stage(v_at, v_phase, STAGES)
        # The first scores of the next tile are under way while this one's output is written.
        q_at, q_phase = next_stage(q_at, q_phase, Q_PLACES)
        tile = _queries(
            q_bufs, q_full, q_empty, q_at, q_phase, part, ROWS, D, Q_REGISTERS, q_layout
        )
        mbarrier.wait(k_full.index(k_at), k_phase)
        keys = k_bufs.index(k_at).reshape([KEYS, D]).permute((1, 0))
        s = warpgroup_mma(tile, keys, s, use_acc=False, is_async=True)

        factor = _row_factor(
            row, n_q, n_k, end, unit, gamma, h, length_exponent, ROWS, CAUSAL, o_layout
        )
        row_scale = factor
        if SUMS:
            sums = factor * gl.convert_layout(gl.sum(total, 1), row_layout)
            if DIVIDE:
                row_scale = factor / (sums + epsilon)
            rows = row + gl.arange(0, ROWS, row_layout)
            if work is None:
                places = (batch * heads + h).to(gl.int64) * n_q + rows
            else:
                places = (first_q + rows).to(gl.int64) * heads + h
            gl.store(row_sum + places, sums, mask=rows < n_q)
            if LOGS:
                logs = gl.convert_layout(gl.sum(log_total, 1), row_layout)
                logs = LN2 * (gl.log2(gl.where(factor > 0, factor, 1.0)) * sums + factor * logs)
                gl.store(log_sum + places, gl.where(wanted, logs, 0.0), mask=rows < n_q)
        result = (acc * row_scale[:, None]).to(gl.bfloat16)
        if work is None:
            stored(result, out, spare, batch, h, row, ROWS, D)
            s = warpgroup_mma_wait(0, [s])
        else:
            # Not with a product under way around branches. A descriptor knows the end of the
            # tensor, not that of a packed sequence.
            s = warpgroup_mma_wait(0, [s])
            if row + ROWS <= n_q:
                stored(result, out, spare, batch, h, first_q + row, ROWS, D)
            else:
                _store_rows(
                    rest, result, h, first_q, row, n_q, stride_oh, stride_ot, D, ROWS, o_layout
                )
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["items", "heads", "tiles", "q_length", "k_length"])
def specialised_kernel(
    q, k, v, out, rest, row_sum, log_sum, gamma, threshold, lengths, work, items, heads, tiles,
    q_length, k_length, stride_oh, stride_ot, scale, unit, threshold_value, length_exponent,
    epsilon,
    GROUP: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr, Q_REGISTERS: gl.constexpr, CAUSAL: gl.constexpr,
    POWER: gl.constexpr, HAS_THRESHOLD: gl.constexpr, PRESCALE: gl.constexpr,
    SUMS: gl.constexpr, DIVIDE: gl.constexpr, EVERY: gl.constexpr,
):  # fmt: skip
    """Output tiles of [B, H, Tq, D] and, with `SUMS`, row sums [B, H, Tq]; see `forward_kernel`."""
    TAIL: gl.constexpr = HAS_THRESHOLD or lengths is not None or work is not None
    if work is not None:
        items = gl.load(work) * heads
    Q_PLACES: gl.constexpr = 1 if Q_REGISTERS else 2
    Q_TILES: gl.constexpr = Q_PLACES * CONSUMERS
    q_bufs = gl.allocate_shared_memory(q.dtype, [Q_TILES, 1, 1, ROWS, D], q.layout)
    o_bufs = gl.allocate_shared_memory(q.dtype, [CONSUMERS, 1, 1, ROWS, D], out.layout)
    k_bufs = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, KEYS, D], k.layout)
    v_bufs = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, KEYS, D], v.layout)
    bar_layout: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [Q_TILES, 1], bar_layout)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_TILES, 1], bar_layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    for i in gl.static_range(Q_TILES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    fence_async_shared()
    gl.thread_barrier()
    buffers = (q_bufs, k_bufs, v_bufs)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    # Constants must stand in the lists themselves: in a variable they would become tensors.
    gl.warp_specialize(
        [
            (_consumer, (
                out, rest, row_sum, log_sum, gamma, threshold, lengths, work, buffers, o_bufs,
                barriers, items, heads, tiles, q_length, k_length, stride_oh, stride_ot, scale,
                unit, threshold_value, length_exponent, epsilon, 0, D, ROWS, KEYS, STAGES,
                Q_PLACES, Q_REGISTERS, CAUSAL, TAIL, POWER, HAS_THRESHOLD, PRESCALE, SUMS, DIVIDE,
                EVERY,
            )),
            (_consumer, (
                out, rest, row_sum, log_sum, gamma, threshold, lengths, work, buffers, o_bufs,
                barriers, items, heads, tiles, q_length, k_length, stride_oh, stride_ot, scale,
                unit, threshold_value, length_exponent, epsilon, 1, D, ROWS, KEYS, STAGES,
                Q_PLACES, Q_REGISTERS, CAUSAL, TAIL, POWER, HAS_THRESHOLD, PRESCALE, SUMS, DIVIDE,
                EVERY,
            )),
            (_producer, (
                q, k, v, lengths, work, buffers, barriers, items, heads, tiles, q_length, k_length,
                GROUP, D, ROWS, KEYS, STAGES, Q_PLACES, CAUSAL, TAIL,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
