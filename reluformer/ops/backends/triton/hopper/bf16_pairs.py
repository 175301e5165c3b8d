"""Weights, slopes and their signs by pairs: two neighbours of a row, bfloat16, in one int32.

What a turn of a loop leaves to the next stays two to a register this way, and one instruction makes
two weights, gates or gradients. `signs.py` says how the bits of signs lie in memory; here a tile is
one block of 64 x 64.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from reluformer.ops.backends.triton.hopper.device import halves


@gluon.jit
def _pairs(x, ROWS: gl.constexpr, COLS: gl.constexpr):
    """Even and odd columns."""
    return gl.split(gl.reshape(x, [ROWS, COLS // 2, 2]))


@gluon.jit
def _packed(x, ROWS: gl.constexpr, COLS: gl.constexpr):
    low, high = _pairs(x, ROWS, COLS)
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def weighed(s, ROWS: gl.constexpr, COLS: gl.constexpr, POWER: gl.constexpr):
    """Pairs of weights max(s, 0)^p, and of max(s, 0)^(p - 1); with power 1 the weights twice."""
    if POWER == 1:
        low, high = _pairs(s, ROWS, COLS)
        p = gl.inline_asm_elementwise(
            "cvt.rn.relu.bf16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], gl.int32, is_pure=True,
            pack=1,
        )  # fmt: skip
        steep = p
    else:
        x = gl.maximum(s, 0.0)
        slope = x
        if POWER >= 3:
            slope = x * x
        if POWER == 4:
            slope = slope * x
        if POWER == 8:
            slope = slope * slope * slope * x
        p = _packed(x * slope, ROWS, COLS)
        steep = _packed(slope, ROWS, COLS)
    return p, steep


@gluon.jit
def sloped(dp, steep, ROWS: gl.constexpr, COLS: gl.constexpr, POWER: gl.constexpr):
    """Pairs of gradients of scores (without the factor p) from those of weights and `weighed`."""
    low, high = _pairs(dp, ROWS, COLS)
    if POWER == 1:
        ds = gl.inline_asm_elementwise(
            """{
            .reg .b32 zero, gate;
            mov.b32 zero, 0;
            set.gt.u32.bf16x2 gate, $3, zero;
            cvt.rn.bf16x2.f32 $0, $2, $1;
            and.b32 $0, $0, gate;
            }""",
            "=r,r,r,r", [low, high, steep], gl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        ds = gl.inline_asm_elementwise(
            """{
            .reg .b32 left, right;
            shl.b32 left, $3, 16;
            and.b32 right, $3, 0xffff0000;
            mul.f32 left, left, $1;
            mul.f32 right, right, $2;
            cvt.rn.bf16x2.f32 $0, right, left;
            }""",
            "=r,r,r,r", [low, high, steep], gl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return ds


@gluon.jit
def operand(x, ROWS: gl.constexpr, COLS: gl.constexpr, LAYOUT: gl.constexpr):
    """Pairs as left operand of a product, [ROWS, COLS]: costs nothing."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [x], (gl.int16, gl.int16), is_pure=True, pack=1
    )
    x = gl.reshape(gl.join(low, high), [ROWS, COLS])
    return gl.convert_layout(x.to(gl.bfloat16, bitcast=True), LAYOUT, assert_trivial=True)


@gluon.jit
def row_sums(x, ROWS: gl.constexpr, COLS: gl.constexpr):
    """Sums over the COLS columns of pairs, as far as they lie in one thread: [ROWS, 4]."""
    left, right = halves(x, ROWS, COLS // 2)
    added = gl.inline_asm_elementwise(
        "add.rn.bf16x2 $0, $1, $2;", "=r,r,r", [left, right], gl.int32, is_pure=True, pack=1
    )
    if COLS > 16:
        result = row_sums(added, ROWS, COLS // 2)
    else:
        result = gl.inline_asm_elementwise(
            """{
            .reg .b32 left, right;
            shl.b32 left, $1, 16;
            and.b32 right, $1, 0xffff0000;
            add.f32 $0, left, right;
            }""",
            "=r,r", [added], gl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return result


@gluon.jit
def _merged(x, ONES: gl.constexpr):
    """Bits of x[..., 0] where the mask has ones, else of x[..., 1]."""
    left, right = gl.split(x)
    # 0xe4 is (first & third) | (second & ~third).
    return gl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, " + ONES + ", 0xe4;", "=r,r,r", [left, right], gl.int32,
        is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def leave_signs(p, block, wanted):
    """Write a bit for every weight of a block [keys, queries], if `wanted`.

    `block` points to its first word, int16. No weight is negative: that it is not zero is another
    comparison than that of `sloped`, so that no gates are kept from one to the other.
    """
    gates = gl.inline_asm_elementwise(
        "{ .reg .b32 zero; mov.b32 zero, 0; set.ne.u32.bf16x2 $0, $1, zero; }",
        "=r,r", [p], gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    # [w, i, r, j, c // 2] -> [w, r, c // 2, j, i]
    gates = gl.permute(gl.reshape(gates, [4, 2, 8, 8, 4]), (0, 2, 4, 3, 1))
    words = _merged(gates, "0x00ff00ff")
    words = _merged(gl.reshape(words, [4, 8, 4, 4, 2]), "0x55555555")
    words = _merged(gl.reshape(words, [4, 8, 4, 2, 2]), "0x33333333")
    words = _merged(words, "0x0f0f0f0f")
    layout: gl.constexpr = words.type.layout
    w = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    r = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    c = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    places = block + (c * 64 + r // 2 * 8 + w * 2 + r % 2)
    gl.store(places, words.to(gl.int16), mask=wanted)
    gl.store(places + 32, (words >> 16).to(gl.int16), mask=wanted)


@gluon.jit
def sign_places(signs, dp, ROWS: gl.constexpr, COLS: gl.constexpr):
    """Where a thread finds the words of its part of dp [queries, keys] in the first block, by
    pairs (int32): [c, w, r // 2]."""
    even, _odd = _pairs(dp, ROWS, COLS)
    even = gl.reshape(even, [8, 8, 4, 2, 4])
    full: gl.constexpr = even.type.layout
    layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(3, full))
    c = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    w = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    r = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    return signs + (c * 16 + r * 4 + w)


@gluon.jit
def signed(dp, words, ROWS: gl.constexpr, COLS: gl.constexpr):
    """Pairs of gradients dp [queries, keys] where the signs of weights are set, else 0.

    Bit 16 (r % 2) + 8 i + j moves to the end of its byte, from where a permutation of bytes spreads
    it.
    """
    low, high = _pairs(dp, ROWS, COLS)
    low = gl.reshape(low, [8, 8, 4, 2, 4])
    high = gl.reshape(high, [8, 8, 4, 2, 4])
    layout: gl.constexpr = low.type.layout
    outer: gl.constexpr = gl.SliceLayout(3, gl.SliceLayout(4, layout))
    inner: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(4, layout))
    j = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, outer)))
    i = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, inner)))
    ends = words[None, :, :, None, :] << (7 - j)[:, None, None, None, None]
    bytes = 0xAA88 + 0x1111 * i[None, None, None, :, None]
    ends, bytes = gl.broadcast(ends, bytes)
    low, ends = gl.broadcast(low, ends)
    low, bytes = gl.broadcast(low, bytes)
    ds = gl.inline_asm_elementwise(
        """{
        .reg .b32 gate;
        prmt.b32 gate, $3, 0, $4;
        cvt.rn.bf16x2.f32 $0, $2, $1;
        and.b32 $0, $0, gate;
        }""",
        "=r,r,r,r,r", [low, high, ends, bytes], gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    return gl.reshape(ds, [ROWS, COLS // 2])
