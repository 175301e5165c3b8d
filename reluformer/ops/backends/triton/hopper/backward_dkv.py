"""Gradients of keys and values with specialised warps: see `specialised_backward.py`."""

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
    query_tiles,
    skipped,
)
from reluformer.ops.backends.triton.hopper.bf16_pairs import leave_signs, operand, sloped, weighed
from reluformer.ops.backends.triton.hopper.device import (
    CONSUMERS,
    cut_of,
    give_back,
    key_end,
    next_stage,
    opaque,
    place_of,
    shifted,
    stored,
    turns_of,
)


@gluon.jit
def _weights(
    s, key, query, offset, cut, scale, MASKED: gl.constexpr, POWER: gl.constexpr,
    HAS_THRESHOLD: gl.constexpr, PRESCALE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """`weighed` scores [keys, queries]; with `MASKED` 0 where a key lies behind a query."""
    s = shifted(s, cut, scale, HAS_THRESHOLD, PRESCALE)
    if MASKED:
        keys = key - offset + gl.arange(0, s.shape[0], gl.SliceLayout(1, LAYOUT))
        queries = query + gl.arange(0, s.shape[1], gl.SliceLayout(0, LAYOUT))
        s = gl.where(keys[:, None] <= queries[None, :], s, 0.0)
    return weighed(s, s.shape[0], s.shape[1], POWER)


@gluon.jit
def _with_terms(dp, terms, GRADS: gl.constexpr, LAYOUT: gl.constexpr):
    """Gradients of weights [keys, queries], and what those of row sums add to them."""
    if GRADS:
        dp = dp + gl.load(terms + gl.arange(0, dp.shape[1], gl.SliceLayout(0, LAYOUT)))[None, :]
    return dp


@gluon.jit
def _consumer(
    dk, dv, signs, terms, gamma, threshold, lengths, buffers, out_bufs, barriers, items, heads,
    tiles, n_q, n_k, key_blocks, head_blocks, padded, scale, unit, threshold_value, length_exponent,
    part: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr,
    SIDE: gl.constexpr, STAGES: gl.constexpr, IN_REGISTERS: gl.constexpr,
    CAUSAL: gl.constexpr, POWER: gl.constexpr, HAS_THRESHOLD: gl.constexpr, PRESCALE: gl.constexpr,
    GRADS: gl.constexpr, ROW_SCALE: gl.constexpr, SIGNS: gl.constexpr,
):  # fmt: skip
    """Rows `part * ROWS ..` of every tile of keys. Scores and gradients of weights take turns in
    the same registers: there are no others."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIDE, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    a_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    k_bufs, v_bufs, q_bufs, g_bufs = buffers
    own_full, own_empty, full, empty = barriers
    offset = n_k - n_q
    turns = turns_of(items, CAUSAL)
    own_phase = 0
    at = 0
    phase = 0
    dp = gl.zeros([ROWS, SIDE], gl.float32, s_layout)
    dk_acc = gl.zeros([ROWS, D], gl.float32, o_layout)
    dv_acc = gl.zeros([ROWS, D], gl.float32, o_layout)

    b, g, tile = place_of(0, items, heads, tiles, CAUSAL)
    base = tile * (CONSUMERS * ROWS)
    end = key_end(lengths, b, n_k)
    first, _, _ = query_tiles(base, base, n_q, n_k, end, CONSUMERS * ROWS, SIDE, CAUSAL)
    low, _, _ = query_tiles(base, base + part * ROWS, n_q, n_k, end, ROWS, SIDE, CAUSAL)
    if CAUSAL:
        at, phase = skipped(full, empty, at, phase, low - first, STAGES)
    mbarrier.wait(own_full.index(part), 0)
    k_tile = owned(k_bufs, part, ROWS, D, IN_REGISTERS, a_layout)
    mbarrier.wait(full.index(at), phase)
    q_tile = q_bufs.index(at).reshape([SIDE, D]).permute((1, 0))
    s = warpgroup_mma(k_tile, q_tile, dp, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, [s])
    for turn in range(0, turns):
        b, g, tile = place_of(turn, items, heads, tiles, CAUSAL)
        base = tile * (CONSUMERS * ROWS)
        key = base + part * ROWS
        end = key_end(lengths, b, n_k)
        first, high, _ = query_tiles(base, base, n_q, n_k, end, CONSUMERS * ROWS, SIDE, CAUSAL)
        low, high, edge = query_tiles(base, key, n_q, n_k, end, ROWS, SIDE, CAUSAL)
        edge = gl.minimum(gl.maximum(edge, low), high)
        more = GROUP * (high - low) > 1
        h = (b * heads + g) * GROUP
        # Scores of the first tile are there.
        cut = cut_of(threshold, threshold_value, scale, g * GROUP, PRESCALE)
        v_tile = owned(v_bufs, part, ROWS, D, IN_REGISTERS, a_layout)
        if IN_REGISTERS:
            give_back(own_empty.index(part))
        p, steep = _weights(
            s, key, low * SIDE, offset, cut, scale, CAUSAL, POWER, HAS_THRESHOLD, PRESCALE, s_layout
        )
        g_tile = g_bufs.index(at).reshape([SIDE, D]).permute((1, 0))
        dp = warpgroup_mma(v_tile, g_tile, s, use_acc=False, is_async=True)
        if SIGNS:
            # Behind the last key no blocks are.
            block = h.to(gl.int64) * head_blocks + low.to(gl.int64) * key_blocks + key // 64
            leave_signs(p, signs + block * 256, key < n_k)
        dp = warpgroup_mma_wait(0, [dp])
        terms_tile = terms
        if GRADS:
            terms_tile = terms + (h.to(gl.int64) * padded + low * SIDE)
        ds = sloped(_with_terms(dp, terms_tile, GRADS, s_layout), steep, ROWS, SIDE, POWER)
        held = at
        at, phase = next_stage(at, phase, STAGES)
        for member in range(0, GROUP):
            h = (b * heads + g) * GROUP + member
            if GROUP > 1:
                cut = cut_of(threshold, threshold_value, scale, g * GROUP + member, PRESCALE)
                if CAUSAL:
                    many = gl.where(member > 0, low - first, 0)
                    at, phase = skipped(full, empty, at, phase, many, STAGES)
            start = gl.where(member > 0, low, low + 1)
            # These move along: sums with a tile's number would make it, and masks, 64 bits wide.
            if GRADS:
                terms_tile = terms + (h.to(gl.int64) * padded + start * SIDE)
            blocks = signs
            if SIGNS:
                block = h.to(gl.int64) * head_blocks + start.to(gl.int64) * key_blocks + key // 64
                blocks = signs + block * 256
            for whole in gl.static_range(2 if CAUSAL else 1):
                stop = edge if CAUSAL and whole == 0 else high
                if CAUSAL and not IN_REGISTERS:
                    # The short loop has addresses of its own: see `opaque`, which costs time.
                    place = opaque(own_phase * 0 + part) if whole == 0 else part
                    k_tile = owned(k_bufs, place, ROWS, D, False, a_layout)
                    v_tile = owned(v_bufs, place, ROWS, D, False, a_layout)
                for t in range(start, stop):
                    # These products are of the tile before.
                    adds = member * (high - low) + t > low + 1
                    weights = operand(p, ROWS, SIDE, p_layout)
                    slopes = operand(ds, ROWS, SIDE, p_layout)
                    dv_acc = warpgroup_mma(
                        weights, g_bufs.index(held).reshape([SIDE, D]), dv_acc, use_acc=adds,
                        is_async=True,
                    )  # fmt: skip
                    mbarrier.wait(full.index(at), phase)
                    q_tile = q_bufs.index(at).reshape([SIDE, D]).permute((1, 0))
                    s = warpgroup_mma(k_tile, q_tile, dp, use_acc=False, is_async=True)
                    dk_acc = warpgroup_mma(
                        slopes, q_bufs.index(held).reshape([SIDE, D]), dk_acc, use_acc=adds,
                        is_async=True,
                    )  # fmt: skip
                    s, dv_acc = warpgroup_mma_wait(1, [s, dv_acc])
                    p, steep = _weights(
                        s, key, t * SIDE, offset, cut, scale, CAUSAL and whole == 0, POWER,
                        HAS_THRESHOLD, PRESCALE, s_layout,
                    )  # fmt: skip
                    g_tile = g_bufs.index(at).reshape([SIDE, D]).permute((1, 0))
                    dp = warpgroup_mma(v_tile, g_tile, s, use_acc=False, is_async=True)
                    if SIGNS:
                        leave_signs(p, blocks, key < n_k)
                        blocks += key_blocks * 256
                    dp, dk_acc = warpgroup_mma_wait(0, [dp, dk_acc])
                    ds = sloped(
                        _with_terms(dp, terms_tile, GRADS, s_layout), steep, ROWS, SIDE, POWER
                    )
                    if GRADS:
                        terms_tile += SIDE
                    mbarrier.arrive(empty.index(held), count=1)
                    held = at
                    at, phase = next_stage(at, phase, STAGES)
                start = gl.maximum(start, edge)
        if not IN_REGISTERS:
            mbarrier.arrive(own_empty.index(part), count=1)
        own_phase ^= 1
        dv_acc = warpgroup_mma(
            operand(p, ROWS, SIDE, p_layout), g_bufs.index(held).reshape([SIDE, D]), dv_acc,
            use_acc=more, is_async=True,
        )  # fmt: skip
        dk_acc = warpgroup_mma(
            operand(ds, ROWS, SIDE, p_layout), q_bufs.index(held).reshape([SIDE, D]), dk_acc,
            use_acc=more, is_async=True,
        )  # fmt: skip
        dv_acc, dk_acc = warpgroup_mma_wait(0, [dv_acc, dk_acc])
        mbarrier.arrive(empty.index(held), count=1)
        # The first scores of the next tile are under way while this one's gradients are written.
        if CAUSAL:
            next_b, _, tile = place_of(turn + 1, items, heads, tiles, CAUSAL)
            next_base = tile * (CONSUMERS * ROWS)
            next_end = key_end(lengths, next_b, n_k)
            first, _, _ = query_tiles(
                next_base, next_base, n_q, n_k, next_end, CONSUMERS * ROWS, SIDE, CAUSAL
            )
            low, _, _ = query_tiles(
                next_base, next_base + part * ROWS, n_q, n_k, next_end, ROWS, SIDE, CAUSAL
            )
            many = gl.where(turn + 1 < turns, low - first, 0)
            at, phase = skipped(full, empty, at, phase, many, STAGES)
        mbarrier.wait(own_full.index(part), own_phase)
        k_tile = owned(k_bufs, part, ROWS, D, IN_REGISTERS, a_layout)
        mbarrier.wait(full.index(at), phase)
        q_tile = q_bufs.index(at).reshape([SIDE, D]).permute((1, 0))
        s = warpgroup_mma(k_tile, q_tile, dp, use_acc=False, is_async=True)
        factor, slope = out_factor(
            end, unit, gamma, g * GROUP, length_exponent, scale, ROW_SCALE, POWER, PRESCALE
        )
        values = dv_acc * factor
        keys = dk_acc * slope
        if lengths is not None:
            # What padding holds may be NaN; nothing of it is seen.
            rows = key + gl.arange(0, ROWS, gl.SliceLayout(1, o_layout))
            values = gl.where((rows < end)[:, None], values, 0.0)
            keys = gl.where((rows < end)[:, None], keys, 0.0)
        stored(values, dv, out_bufs.index(part), b, g, key, ROWS, D)
        stored(keys, dk, out_bufs.index(part), b, g, key, ROWS, D)
        s = warpgroup_mma_wait(0, [s])
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["items", "heads", "tiles", "n_q", "n_k", "key_blocks", "head_blocks"])
def specialised_keys_kernel(
    q, k, v, grad_out, dk, dv, signs, terms, gamma, threshold, lengths, items, heads, tiles, n_q,
    n_k, key_blocks, head_blocks, padded, scale, unit, threshold_value, length_exponent,
    GROUP: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, SIDE: gl.constexpr,
    STAGES: gl.constexpr, IN_REGISTERS: gl.constexpr,
    CAUSAL: gl.constexpr, POWER: gl.constexpr, HAS_THRESHOLD: gl.constexpr, PRESCALE: gl.constexpr,
    GRADS: gl.constexpr, ROW_SCALE: gl.constexpr, SIGNS: gl.constexpr,
):  # fmt: skip
    """dK and dV, [B, Hkv, Tk, D], summed over the query heads of a group: see `keys_kernel`.

    `heads` are those of keys, `key_blocks` and `head_blocks` sizes of `signs`, `padded` rows of
    a head in `terms`. ROWS = SIDE = 64 with `SIGNS`.
    """
    k_bufs = gl.allocate_shared_memory(q.dtype, [CONSUMERS, 1, 1, ROWS, D], k.layout)
    v_bufs = gl.allocate_shared_memory(q.dtype, [CONSUMERS, 1, 1, ROWS, D], v.layout)
    q_bufs = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, SIDE, D], q.layout)
    g_bufs = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, SIDE, D], grad_out.layout)
    out_bufs = gl.allocate_shared_memory(q.dtype, [CONSUMERS, 1, 1, ROWS, D], dk.layout)
    own_full, own_empty = barriers_of(CONSUMERS, 1)
    full, empty = barriers_of(STAGES, CONSUMERS)
    fence_async_shared()
    gl.thread_barrier()
    buffers = (k_bufs, v_bufs, q_bufs, g_bufs)
    barriers = (own_full, own_empty, full, empty)
    # Constants must stand in the lists themselves: in a variable they would become tensors.
    gl.warp_specialize(
        [
            (_consumer, (
                dk, dv, signs, terms, gamma, threshold, lengths, buffers, out_bufs, barriers, items,
                heads, tiles, n_q, n_k, key_blocks, head_blocks, padded, scale, unit,
                threshold_value, length_exponent, 0, GROUP, D, ROWS, SIDE, STAGES,
                IN_REGISTERS, CAUSAL, POWER, HAS_THRESHOLD, PRESCALE, GRADS, ROW_SCALE, SIGNS,
            )),
            (_consumer, (
                dk, dv, signs, terms, gamma, threshold, lengths, buffers, out_bufs, barriers, items,
                heads, tiles, n_q, n_k, key_blocks, head_blocks, padded, scale, unit,
                threshold_value, length_exponent, 1, GROUP, D, ROWS, SIDE, STAGES,
                IN_REGISTERS, CAUSAL, POWER, HAS_THRESHOLD, PRESCALE, GRADS, ROW_SCALE, SIGNS,
            )),
            (producer, (
                k, v, q, grad_out, lengths, buffers, barriers, items, heads, tiles, n_q, n_k,
                GROUP, D, ROWS, SIDE, STAGES, CAUSAL, True, False,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
