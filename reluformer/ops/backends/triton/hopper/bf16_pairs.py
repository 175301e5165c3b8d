"""Weights, score gradients and signs as pairs: two neighbouring columns, bfloat16, in one int32.

A tile [ROWS, COLS] becomes int32 pairs [ROWS, COLS / 2] with the even column in the low half. The
state that one iteration of a loop leaves to the next takes half the registers this way, and one
instruction computes two weights, gates or gradients. `portable/sign_bits.py` describes how sign
bits lie in memory; here a tile is one block of 64 x 64.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from reluformer.ops.backends.triton.hopper.device import split_columns


@gluon.jit
def _even_odd(x):
    """(even, odd) columns of x [ROWS, COLS]; each [ROWS, COLS / 2]."""
    ROWS: gl.constexpr = x.shape[0]
    COLS: gl.constexpr = x.shape[1]
    return gl.split(gl.reshape(x, [ROWS, COLS // 2, 2]))


@gluon.jit
def _rectified_pairs(x):
    """Pairs [ROWS, COLS / 2] of max(x, 0), x [ROWS, COLS] in float32."""
    even, odd = _even_odd(x)
    return gl.inline_asm_elementwise(
        "cvt.rn.relu.bf16x2.f32 $0, $2, $1;", "=r,r,r", [even, odd], gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def relu_powers(s, POWER: gl.constexpr):
    """Pairs of the weights max(s, 0)^p, and of max(s, 0)^(p - 1), from scores s [ROWS, COLS].

    With power 1 the second result is the weights again: their sign is all that is needed.
    """
    # Products with |s| keep the sign of s and cost no instruction more: the conversion rectifies.
    square = s
    if POWER >= 2:
        square = s * gl.abs(s)  # [ROWS, COLS]
    if POWER == 1:
        p = _rectified_pairs(s)  # [ROWS, COLS / 2]
        relu_pow_minus_1 = p
    elif POWER == 2:
        p = _rectified_pairs(square)
        relu_pow_minus_1 = _rectified_pairs(s)
    elif POWER == 4:
        p = _rectified_pairs(square * gl.abs(square))
        relu_pow_minus_1 = _rectified_pairs(square * gl.abs(s))
    else:
        fourth = square * gl.abs(square)
        p = _rectified_pairs(fourth * gl.abs(fourth))
        relu_pow_minus_1 = _rectified_pairs(fourth * gl.abs(square) * gl.abs(s))
    return p, relu_pow_minus_1


@gluon.jit
def score_gradients(dp, relu_pow_minus_1, POWER: gl.constexpr):
    """Pairs of dS = dP * max(s, 0)^(p - 1), without the factor p.

    Products of bfloat16 round once more than products of float32, and take a third of the
    instructions.

    Args:
        dp: gradients of the weights [ROWS, COLS], float32.
        relu_pow_minus_1: pairs from `relu_powers`.
    """
    even, odd = _even_odd(dp)  # [ROWS, COLS / 2]
    if POWER == 1:
        # dP where the weight is positive, else 0.
        ds = gl.inline_asm_elementwise(
            """{
            .reg .b32 zero, gate;
            mov.b32 zero, 0;
            set.gt.u32.bf16x2 gate, $3, zero;
            cvt.rn.bf16x2.f32 $0, $2, $1;
            and.b32 $0, $0, gate;
            }""",
            "=r,r,r,r", [even, odd, relu_pow_minus_1], gl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        ds = gl.inline_asm_elementwise(
            """{
            .reg .b32 pair;
            cvt.rn.bf16x2.f32 pair, $2, $1;
            mul.rn.bf16x2 $0, pair, $3;
            }""",
            "=r,r,r,r", [even, odd, relu_pow_minus_1], gl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return ds


@gluon.jit
def as_left_operand(pairs, LAYOUT: gl.constexpr):
    """Pairs [ROWS, COLS / 2] as the left operand [ROWS, COLS] of a product; no instructions."""
    ROWS: gl.constexpr = pairs.shape[0]
    COLS: gl.constexpr = 2 * pairs.shape[1]
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], (gl.int16, gl.int16), is_pure=True, pack=1
    )
    x = gl.reshape(gl.join(even, odd), [ROWS, COLS])
    return gl.convert_layout(x.to(gl.bfloat16, bitcast=True), LAYOUT, assert_trivial=True)


@gluon.jit
def partial_pair_sums(pairs):
    """Partial sums [ROWS, 4], float32, over the columns of pairs [ROWS, COLS / 2]."""
    left, right = split_columns(pairs)
    added = gl.inline_asm_elementwise(
        "add.rn.bf16x2 $0, $1, $2;", "=r,r,r", [left, right], gl.int32, is_pure=True, pack=1
    )
    if pairs.shape[1] > 8:
        result = partial_pair_sums(added)
    else:
        # bfloat16 is the upper half of float32.
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
def _merge_bits(x, ONES: gl.constexpr):
    """Bits of x[..., 0] where the mask ONES is set, else of x[..., 1]."""
    left, right = gl.split(x)
    # 0xe4 is (first & third) | (second & ~third).
    return gl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, " + ONES + ", 0xe4;", "=r,r,r", [left, right], gl.int32,
        is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def store_signs(p, block, condition):
    """Store one bit per weight: whether it is positive.

    Args:
        p: pairs of weights [64 keys, 32 pairs of queries]. They are not negative, so the test is
            "not zero". `score_gradients` tests "greater than zero": equal tests would make the
            compiler keep the gates in registers between the two.
        block: pointer to the first int16 word of the 64 x 64 block.
        condition: scalar condition of the store.
    """
    gates = gl.inline_asm_elementwise(
        "{ .reg .b32 zero; mov.b32 zero, 0; set.ne.u32.bf16x2 $0, $1, zero; }",
        "=r,r", [p], gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    # Key 16 w + 8 i + r and query pair 4 j + c // 2: [w, i, r, j, c // 2] -> [w, r, c // 2, j, i].
    gates = gl.permute(gl.reshape(gates, [4, 2, 8, 8, 4]), (0, 2, 4, 3, 1))
    words = _merge_bits(gates, "0x00ff00ff")  # [4, 8, 4, 8]
    words = _merge_bits(gl.reshape(words, [4, 8, 4, 4, 2]), "0x55555555")  # [4, 8, 4, 4]
    words = _merge_bits(gl.reshape(words, [4, 8, 4, 2, 2]), "0x33333333")  # [4, 8, 4, 2]
    words = _merge_bits(words, "0x0f0f0f0f")  # [w, r, c // 2]
    layout: gl.constexpr = words.type.layout
    w = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    r = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    c = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    places = block + (c * 64 + r // 2 * 8 + w * 2 + r % 2)
    gl.store(places, words.to(gl.int16), mask=condition)
    gl.store(places + 32, (words >> 16).to(gl.int16), mask=condition)


@gluon.jit
def sign_pointers(signs, dp):
    """Pointers [c, w, r // 2] to the int32 words of a thread's part of dp [64 queries, 64 keys].

    They point into the first block of `signs`.
    """
    even, _odd = _even_odd(dp)
    even = gl.reshape(even, [8, 8, 4, 2, 4])
    full: gl.constexpr = even.type.layout
    layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(3, full))
    c = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    w = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    r = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    return signs + (c * 16 + r * 4 + w)


@gluon.jit
def gate_by_signs(dp, words):
    """Pairs of dS: dP [64 queries, 64 keys] where the sign bit of the weight is set, else 0.

    `words` [c, w, r // 2] come from `sign_pointers`. Bit 16 (r % 2) + 8 i + j moves to the end of
    its byte. From there a byte permutation that copies signs spreads it over 16 bits.
    """
    ROWS: gl.constexpr = dp.shape[0]
    COLS: gl.constexpr = dp.shape[1]
    even, odd = _even_odd(dp)
    even = gl.reshape(even, [8, 8, 4, 2, 4])  # [j, c, w, i, r // 2]
    odd = gl.reshape(odd, [8, 8, 4, 2, 4])
    layout: gl.constexpr = even.type.layout
    outer: gl.constexpr = gl.SliceLayout(3, gl.SliceLayout(4, layout))
    inner: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(4, layout))
    j = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, outer)))
    i = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, inner)))
    ends = words[None, :, :, None, :] << (7 - j)[:, None, None, None, None]
    # Digits 8 .. 11 of a byte permutation copy the sign of bytes 0 .. 3.
    selected = 0xAA88 + 0x1111 * i[None, None, None, :, None]
    ends, selected = gl.broadcast(ends, selected)
    even, ends = gl.broadcast(even, ends)
    even, selected = gl.broadcast(even, selected)
    ds = gl.inline_asm_elementwise(
        """{
        .reg .b32 gate;
        prmt.b32 gate, $3, 0, $4;
        cvt.rn.bf16x2.f32 $0, $2, $1;
        and.b32 $0, $0, gate;
        }""",
        "=r,r,r,r,r", [even, odd, ends, selected], gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    return gl.reshape(ds, [ROWS, COLS // 2])
