"""Weights of the forward kernel and their row sums, on tiles in the registers of one consumer.

A thread of a consumer holds pairs of neighbouring columns. Sums over a row stay partial, one value
per thread and place, until the end of the key loop: the kernel reduces them across threads once.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from reluformer.ops.backends.triton.hopper.device import mask_keys, shift_scores, split_columns


@gluon.jit
def signed_powers(s, bounds, col, threshold, scale, MASKED: gl.constexpr, CONFIG: gl.constexpr):
    """Powers |score|^p with the sign of the score, float32; `rectified` makes them weights.

    Args:
        s: products q k [ROWS, KEYS] with the keys from `col` on, float32.
        bounds: which keys the rows see; applied only with `MASKED`.
        threshold: scalar, from `scaled_threshold`.
    """
    s = shift_scores(s, threshold, scale, CONFIG)  # [ROWS, KEYS]
    if MASKED:
        s = mask_keys(s, bounds, col, CONFIG.CAUSAL)
    # Squares s |s| keep the sign, and |s| costs no instruction: the conversion rectifies them.
    if CONFIG.POWER > 1:
        s = s * gl.abs(s)
    if CONFIG.POWER >= 4:
        s = s * gl.abs(s)
    if CONFIG.POWER == 8:
        s = s * gl.abs(s)
    return s


@gluon.jit
def rectified(x):
    """max(x, 0) in bfloat16, in the layout of x."""
    # Rectifies and converts two values per instruction; the compiler does not find it by itself.
    return gl.inline_asm_elementwise(
        "cvt.rn.relu.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def partial_row_sums(w):
    """Partial sums [ROWS, 8], float32, over the columns of bfloat16 weights w [ROWS, COLS]."""
    left, right = split_columns(w)  # [ROWS, COLS / 2]
    added = gl.inline_asm_elementwise(
        "add.rn.bf16x2 $0, $1, $2;", "=r,r,r", [left, right], gl.bfloat16, is_pure=True, pack=2
    )
    if w.shape[1] > 16:
        result = partial_row_sums(added)
    else:
        # bfloat16 is the upper half of float32.
        result = gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [added], gl.float32,
            is_pure=True, pack=2,
        )  # fmt: skip
    return result


@gluon.jit
def partial_log_sums(w):
    """Partial sums [ROWS, 4] of w log2 w over the columns of bfloat16 weights w [ROWS, COLS].

    The smallest normal number stands for 0 in the logarithm.
    """
    # Adds the terms of a pair of columns into the even one; the odd one becomes 0.
    terms = gl.inline_asm_elementwise(
        """{
        .reg .b32 pair, least;
        .reg .f32 low, high, low_log, high_log;
        mov.b32 least, 0x00800080;
        max.bf16x2 pair, $2, least;
        shl.b32 low, pair, 16;
        and.b32 high, pair, 0xffff0000;
        lg2.approx.ftz.f32 low_log, low;
        lg2.approx.ftz.f32 high_log, high;
        shl.b32 low, $2, 16;
        and.b32 high, $2, 0xffff0000;
        mul.f32 low, low, low_log;
        fma.rn.f32 $0, high, high_log, low;
        mov.b32 $1, 0;
        }""",
        "=r,=r,r", [w], gl.float32, is_pure=True, pack=2,
    )  # fmt: skip
    return partial_even_sums(terms)


@gluon.jit
def partial_even_sums(x):
    """Partial sums [ROWS, 4] over the even columns of x [ROWS, COLS]."""
    ROWS: gl.constexpr = x.shape[0]
    COLS: gl.constexpr = x.shape[1]
    even, _odd = gl.split(gl.reshape(x, [ROWS, COLS // 2, 2]))  # [ROWS, COLS / 2]
    return _fold(even)


@gluon.jit
def _fold(x):
    """Add halves of the columns of x [ROWS, COLS] until 4 columns are left, all in one thread."""
    if x.shape[1] > 4:
        left, right = split_columns(x)
        x = _fold(left + right)
    return x
