"""Weights of the specialised forward, and their sums: tiles in the registers of a consumer."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from reluformer.ops.backends.triton.hopper.device import halves, seen, shifted


@gluon.jit
def row_sums(packed, ROWS: gl.constexpr, COLS: gl.constexpr):
    """Sums over the columns of a bfloat16 tile, as far as they lie in one thread: [ROWS, 8]."""
    left, right = halves(packed, ROWS, COLS)
    added = gl.inline_asm_elementwise(
        "add.rn.bf16x2 $0, $1, $2;", "=r,r,r", [left, right], gl.bfloat16, is_pure=True, pack=2
    )
    if COLS > 16:
        result = row_sums(added, ROWS, COLS // 2)
    else:
        result = gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [added], gl.float32,
            is_pure=True, pack=2,
        )  # fmt: skip
    return result


@gluon.jit
def log_sums(packed, ROWS: gl.constexpr, COLS: gl.constexpr):
    """Sums of w log2 w over the columns of a bfloat16 tile, as far as they lie in one thread.

    The least normal number stands for 0, which has no logarithm.
    """
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
        "=r,=r,r", [packed], gl.float32, is_pure=True, pack=2,
    )  # fmt: skip
    return even_sums(terms, ROWS, COLS)


@gluon.jit
def even_sums(x, ROWS: gl.constexpr, COLS: gl.constexpr):
    """Sums over the even columns, as far as they lie in one thread: [ROWS, 4]."""
    even, _odd = gl.split(gl.reshape(x, [ROWS, COLS // 2, 2]))
    return _folded(even, ROWS, COLS // 2)


@gluon.jit
def _folded(x, ROWS: gl.constexpr, COLS: gl.constexpr):
    if COLS > 4:
        left, right = halves(x, ROWS, COLS)
        x = _folded(left + right, ROWS, COLS // 2)
    return x


@gluon.jit
def weights_of(
    score, row, col, offset, end, cut, scale, MASKED: gl.constexpr, CAUSAL: gl.constexpr,
    POWER: gl.constexpr, HAS_THRESHOLD: gl.constexpr, PRESCALE: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """max(score, 0)^p of what is seen, in bfloat16; [ROWS, KEYS] in the layout of the scores."""
    score = shifted(score, cut, scale, HAS_THRESHOLD, PRESCALE)
    if MASKED:
        score = seen(score, row, col, offset, end, CAUSAL, LAYOUT)
    if POWER > 1:
        score = gl.maximum(score, 0.0)
        square = score * score
        score = square * score if POWER == 3 else square
    if POWER >= 4:
        score *= score
    if POWER == 8:
        score *= score
    # Two values an instruction, which the compiler does not find by itself.
    return gl.inline_asm_elementwise(
        "cvt.rn.relu.bf16x2.f32 $0, $2, $1;", "=r,r,r", [score], gl.bfloat16, is_pure=True, pack=2
    )
