"""Gradients of queries with specialised warps: see `specialised_backward.py`.

With `SIGNS` of the weights, which the keys' kernel has left, no scores are made and no queries
read: dP = dO V' passes where a sign is set.
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
    barriers_of,
    out_factor,
    owned,
    producer,
    skipped,
)
from reluformer.ops.backends.triton.hopper.bf16_pairs import (
    operand,
    row_sums,
    sign_places,
    signed,
    sloped,
    weighed,
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
    seen,
    shifted,
    stored,
    turns_of,
)


@gluon.jit
def _slopes(
    s, dp, words, constant, row, col, offset, end, cut, scale, MASKED: gl.constexpr,
    CAUSAL: gl.constexpr, POWER: gl.constexpr, HAS_THRESHOLD: gl.constexpr,
    PRESCALE: gl.constexpr, GRADS: gl.constexpr, SIGNS: gl.constexpr, TAIL: gl.constexpr,
    BEHIND: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Pairs of gradients of scores, and s and dp when they have been waited for; `BEHIND` dp so
    many products are under way, and one more after s."""
    if not SIGNS:
        s = warpgroup_mma_wait(BEHIND + 1, [s])
        score = shifted(s, cut, scale, HAS_THRESHOLD, PRESCALE)
        if MASKED:
            score = seen(score, row, col, offset, end, CAUSAL, LAYOUT)
        _, steep = weighed(score, s.shape[0], s.shape[1], POWER)
    dp = warpgroup_mma_wait(BEHIND, [dp])
    grad = dp
    if GRADS:
        grad = grad + constant[:, None]
    if MASKED and TAIL and (SIGNS or POWER > 1):
        # What padding holds may be NaN, and its signs are nobody's.
        grad = seen(grad, row, col, offset, end, False, LAYOUT)
    if SIGNS:
        ds = signed(grad, words, grad.shape[0], grad.shape[1])
    else:
        ds = sloped(grad, steep, grad.shape[0], grad.shape[1], POWER)
    return ds, s, dp


@gluon.jit
def _consumer(
    dq, row_shift, signs, terms, gamma, threshold, lengths, buffers, out_bufs, barriers, items,
    heads, tiles, n_q, n_k, key_blocks, head_blocks, padded, scale, unit, threshold_value,
    length_exponent, part: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, SIDE: gl.constexpr,
    STAGES: gl.constexpr, IN_REGISTERS: gl.constexpr, CAUSAL: gl.constexpr, POWER: gl.constexpr,
    HAS_THRESHOLD: gl.constexpr, PRESCALE: gl.constexpr, GRADS: gl.constexpr,
    ROW_SCALE: gl.constexpr, SIGNS: gl.constexpr,
):  # fmt: skip
    """Rows `part * ROWS ..` of every tile of queries."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIDE, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    a_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    # With a threshold a key that does not exist may have weight, and a gradient of its own.
    TAIL: gl.constexpr = lengths is not None or row_shift is not None
    # What is not seen has no sign.
    EDGES: gl.constexpr = TAIL or (CAUSAL and not SIGNS)
    q_bufs, g_bufs, k_bufs, v_bufs = buffers
    own_full, own_empty, full, empty = barriers
    spare = out_bufs.index(part)
    offset = n_k - n_q
    turns = turns_of(items, CAUSAL)
    own_phase = 0
    at = 0
    phase = 0
    s = gl.zeros([ROWS, SIDE], gl.float32, s_layout)
    dp = gl.zeros([ROWS, SIDE], gl.float32, s_layout)
    acc = gl.zeros([ROWS, D], gl.float32, o_layout)
    words = 0
    if SIGNS:
        places = sign_places(signs, dp, ROWS, SIDE)

    mbarrier.wait(own_full.index(part), 0)
    if not SIGNS:
        q_tile = owned(q_bufs, part, ROWS, D, IN_REGISTERS, a_layout)
    g_tile = owned(g_bufs, part, ROWS, D, IN_REGISTERS, a_layout)
    if IN_REGISTERS:
        give_back(own_empty.index(part))
    mbarrier.wait(full.index(0), 0)
    if SIGNS:
        b, h, tile = place_of(0, items, heads, tiles, CAUSAL)
        block = (b * heads + h).to(gl.int64) * head_blocks
        block += (tile * CONSUMERS + part) * (ROWS // 64) * key_blocks
        words = gl.load(places + block * 128)
        v_tile = v_bufs.index(0).reshape([SIDE, D]).permute((1, 0))
        dp = warpgroup_mma(g_tile, v_tile, dp, use_acc=False, is_async=True)
        dp = warpgroup_mma_wait(0, [dp])
    else:
        k_tile = k_bufs.index(0).reshape([SIDE, D]).permute((1, 0))
        s = warpgroup_mma(q_tile, k_tile, s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, [s])
    for turn in range(0, turns):
        b, h, tile = place_of(turn, items, heads, tiles, CAUSAL)
        row = tile * (CONSUMERS * ROWS)
        end = key_end(lengths, b, n_k)
        count, _ = key_tiles(row, n_q, n_k, end, CONSUMERS * ROWS, SIDE, CAUSAL, True)
        row += part * ROWS
        mine, whole = key_tiles(row, n_q, n_k, end, ROWS, SIDE, CAUSAL, TAIL)
        cut = cut_of(threshold, threshold_value, scale, h, PRESCALE)
        constant = 0.0
        if GRADS:
            rows = row + gl.arange(0, ROWS, row_layout)
            places_of_terms = terms + (b * heads + h).to(gl.int64) * padded + rows
            constant = gl.load(places_of_terms, mask=rows < padded, other=0.0)
        # The first product of the first tile is there.
        if SIGNS:
            block = (b * heads + h).to(gl.int64) * head_blocks + row // 64 * key_blocks
            blocks = places + block * 128 + 128
            next_words = gl.load(blocks)
        else:
            v_tile = v_bufs.index(at).reshape([SIDE, D]).permute((1, 0))
            dp = warpgroup_mma(g_tile, v_tile, dp, use_acc=False, is_async=True)
        ds, s, dp = _slopes(
            s, dp, words, constant, row, 0, offset, end, cut, scale, EDGES, CAUSAL, POWER,
            HAS_THRESHOLD, PRESCALE, GRADS, SIGNS, TAIL, 0, s_layout,
        )  # fmt: skip
        if SIGNS:
            words = next_words
        total = 0.0
        if row_shift is not None:
            total = row_sums(ds, ROWS, SIDE)
        held = at
        at, phase = next_stage(at, phase, STAGES)
        low = 1
        high = mine
        for edge in gl.static_range(2 if EDGES else 1):
            if EDGES:
                if edge == 0:
                    high = gl.minimum(whole, mine)
                else:
                    low = gl.maximum(whole, 1)
                    high = mine
                    if not IN_REGISTERS:
                        place = opaque(own_phase * 0 + part)
                        if not SIGNS:
                            q_tile = owned(q_bufs, place, ROWS, D, False, a_layout)
                        g_tile = owned(g_bufs, place, ROWS, D, False, a_layout)
            for j in range(low, high):
                mbarrier.wait(full.index(at), phase)
                if not SIGNS:
                    k_tile = k_bufs.index(at).reshape([SIDE, D]).permute((1, 0))
                    s = warpgroup_mma(q_tile, k_tile, s, use_acc=False, is_async=True)
                v_tile = v_bufs.index(at).reshape([SIDE, D]).permute((1, 0))
                dp = warpgroup_mma(g_tile, v_tile, dp, use_acc=False, is_async=True)
                acc = warpgroup_mma(
                    operand(ds, ROWS, SIDE, p_layout), k_bufs.index(held).reshape([SIDE, D]), acc,
                    use_acc=j > 1, is_async=True,
                )  # fmt: skip
                if SIGNS:
                    # Those of the next tile: memory is far.
                    blocks += 128
                    next_words = gl.load(blocks)
                ds, s, dp = _slopes(
                    s, dp, words, constant, row, j * SIDE, offset, end, cut, scale, edge == 1,
                    CAUSAL, POWER, HAS_THRESHOLD, PRESCALE, GRADS, SIGNS, TAIL, 1, s_layout,
                )  # fmt: skip
                if SIGNS:
                    words = next_words
                if row_shift is not None:
                    total += row_sums(ds, ROWS, SIDE)
                acc = warpgroup_mma_wait(0, [acc])
                mbarrier.arrive(empty.index(held), count=1)
                held = at
                at, phase = next_stage(at, phase, STAGES)
        if not IN_REGISTERS:
            mbarrier.arrive(own_empty.index(part), count=1)
        own_phase ^= 1
        keys = k_bufs.index(held).reshape([SIDE, D])
        if lengths is not None:
            # The store of the tile before must have read the buffer: thread 0 knows.
            tma.store_wait(0)
            gl.thread_barrier()
            keys = clean(keys, spare.reshape([ROWS, D]), (mine - 1) * SIDE, end, SIDE, D)
        acc = warpgroup_mma(
            operand(ds, ROWS, SIDE, p_layout), keys, acc, use_acc=mine > 1, is_async=True
        )
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(empty.index(held), count=1)
        at, phase = skipped(full, empty, at, phase, count - mine, STAGES)
        # The first product of the next tile is under way while this one's gradient is written.
        mbarrier.wait(own_full.index(part), own_phase)
        if not SIGNS:
            q_tile = owned(q_bufs, part, ROWS, D, IN_REGISTERS, a_layout)
        g_tile = owned(g_bufs, part, ROWS, D, IN_REGISTERS, a_layout)
        if IN_REGISTERS:
            give_back(own_empty.index(part))
        mbarrier.wait(full.index(at), phase)
        if SIGNS:
            next_b, next_h, tile = place_of(turn + 1, items, heads, tiles, CAUSAL)
            block = (next_b * heads + next_h).to(gl.int64) * head_blocks
            block += (tile * CONSUMERS + part) * (ROWS // 64) * key_blocks
            words = gl.load(places + block * 128)
            v_tile = v_bufs.index(at).reshape([SIDE, D]).permute((1, 0))
            dp = warpgroup_mma(g_tile, v_tile, dp, use_acc=False, is_async=True)
        else:
            k_tile = k_bufs.index(at).reshape([SIDE, D]).permute((1, 0))
            s = warpgroup_mma(q_tile, k_tile, s, use_acc=False, is_async=True)
        _, slope = out_factor(
            end, unit, gamma, h, length_exponent, scale, ROW_SCALE, POWER, PRESCALE
        )
        if row_shift is not None:
            rows = row + gl.arange(0, ROWS, row_layout)
            sums = gl.convert_layout(gl.sum(total, 1), row_layout) * (slope / scale)
            places_of_sums = row_shift + (b * heads + h).to(gl.int64) * n_q + rows
            gl.store(places_of_sums, sums, mask=rows < n_q)
        stored(acc * slope, dq, spare, b, h, row, ROWS, D)
        if SIGNS:
            dp = warpgroup_mma_wait(0, [dp])
        else:
            s = warpgroup_mma_wait(0, [s])
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["items", "heads", "tiles", "n_q", "n_k", "key_blocks", "head_blocks"])
def specialised_queries_kernel(
    q, k, v, grad_out, dq, row_shift, signs, terms, gamma, threshold, lengths, items, heads, tiles,
    n_q, n_k, key_blocks, head_blocks, padded, scale, unit, threshold_value, length_exponent,
    GROUP: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, SIDE: gl.constexpr,
    STAGES: gl.constexpr, IN_REGISTERS: gl.constexpr, CAUSAL: gl.constexpr, POWER: gl.constexpr,
    HAS_THRESHOLD: gl.constexpr, PRESCALE: gl.constexpr, GRADS: gl.constexpr,
    ROW_SCALE: gl.constexpr, SIGNS: gl.constexpr,
):  # fmt: skip
    """dQ [B, H, Tq, D] and, if it is there, `row_shift` [B, H, Tq], the sum of dS: see
    `queries_kernel`, for the sizes `specialised_keys_kernel`.

    `signs` are int32 here. ROWS = SIDE = 64 with `SIGNS`.
    """
    g_bufs = gl.allocate_shared_memory(q.dtype, [CONSUMERS, 1, 1, ROWS, D], grad_out.layout)
    q_bufs = g_bufs
    if not SIGNS:
        q_bufs = gl.allocate_shared_memory(q.dtype, [CONSUMERS, 1, 1, ROWS, D], q.layout)
    k_bufs = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, SIDE, D], k.layout)
    v_bufs = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, SIDE, D], v.layout)
    out_bufs = gl.allocate_shared_memory(q.dtype, [CONSUMERS, 1, 1, ROWS, D], dq.layout)
    own_full, own_empty = barriers_of(CONSUMERS, 1)
    full, empty = barriers_of(STAGES, CONSUMERS)
    fence_async_shared()
    gl.thread_barrier()
    buffers = (q_bufs, g_bufs, k_bufs, v_bufs)
    barriers = (own_full, own_empty, full, empty)
    # Constants must stand in the lists themselves: in a variable they would become tensors.
    gl.warp_specialize(
        [
            (_consumer, (
                dq, row_shift, signs, terms, gamma, threshold, lengths, buffers, out_bufs, barriers,
                items, heads, tiles, n_q, n_k, key_blocks, head_blocks, padded, scale, unit,
                threshold_value, length_exponent, 0, D, ROWS, SIDE, STAGES, IN_REGISTERS, CAUSAL,
                POWER, HAS_THRESHOLD, PRESCALE, GRADS, ROW_SCALE, SIGNS,
            )),
            (_consumer, (
                dq, row_shift, signs, terms, gamma, threshold, lengths, buffers, out_bufs, barriers,
                items, heads, tiles, n_q, n_k, key_blocks, head_blocks, padded, scale, unit,
                threshold_value, length_exponent, 1, D, ROWS, SIDE, STAGES, IN_REGISTERS, CAUSAL,
                POWER, HAS_THRESHOLD, PRESCALE, GRADS, ROW_SCALE, SIGNS,
            )),
            (producer, (
                q, grad_out, k, v, lengths, buffers, barriers, items, heads, tiles, n_q, n_k,
                GROUP, D, ROWS, SIDE, STAGES, CAUSAL, False, SIGNS,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
