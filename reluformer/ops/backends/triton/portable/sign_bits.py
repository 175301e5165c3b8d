"""Signs of the weights, one bit each, which `dkv_kernel` stores for `dq_kernel`.

A block of 64 queries and 64 keys takes 512 contiguous bytes. The pair of query 8 j + c and key
16 w + 8 i + r is bit 8 i + j of the 16-bit word at [c, r // 2, w, r % 2]. This order follows the
register layout of a matrix product (two neighbours of a row in one register, then rows 8 apart,
then columns 8, 16, 32 apart). In `dkv_kernel`, rows are keys: a thread holds all bits of each of
its words and needs no exchange with other threads. In `dq_kernel`, rows are queries: the bits that
a thread needs are in 16 contiguous bytes, and its pair of keys is in the two halves of a 32-bit
word.
"""

import triton
import triton.language as tl

from reluformer.ops.backends.triton.portable.device import BLOCK, halves

# Queries and keys of a block.
SIDE = tl.constexpr(64)
# 16-bit words and 32-bit pairs of words in a block.
WORDS = tl.constexpr(256)
PAIRS = tl.constexpr(128)
# Largest number of keys in a tile.
WIDEST = tl.constexpr(128)
# Blocks allocated after the last one: readers prefetch up to this many blocks ahead.
SLACK = 8


@triton.jit
def key_blocks(k_length):
    """Blocks along the keys, rounded up to the widest tile so that no tile needs a mask."""
    return tl.cdiv(k_length, WIDEST) * (WIDEST // SIDE)


@triton.jit
def head_blocks(q_length, k_length):
    """Blocks of one head, rounded up to whole tiles of queries and keys."""
    return tl.cdiv(q_length, BLOCK) * (BLOCK // SIDE) * key_blocks(k_length)


@triton.jit
def positive(packed):
    """int16 with all bits set where a bfloat16 value is positive, else 0; two values at once."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 zero; mov.b32 zero, 0; set.gt.u32.bf16x2 $0, $1, zero; }",
        "=r,r", [packed], tl.int16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def gated(grad, gates):
    """`grad` in bfloat16 where `gates` has ones, else 0; two values at once.

    The gates replace the float32 scores, which need not stay in registers until here.
    """
    return tl.inline_asm_elementwise(
        "{ cvt.rn.bf16x2.f32 $0, $2, $1; and.b32 $0, $0, $3; }",
        "=r,r,r,r", [grad, gates], tl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def gate_words(gates, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """`sign_words` from gates [BLOCK_N, BLOCK_M] of `positive`, by merging their bits."""
    lines: tl.constexpr = BLOCK_N * (BLOCK_M // SIDE)
    # Each step halves the columns and keeps one bit more of every group: j, then i.
    words = _merged(gates.reshape(lines, SIDE), "0x0f0f0f0f", lines, SIDE)
    words = _merged(words, "0x33333333", lines, SIDE // 2)
    words = _merged(words, "0x55555555", lines, SIDE // 4)
    words = words.reshape(BLOCK_N // 16, 2 * BLOCK_M)
    return _merged(words, "0x00ff00ff", BLOCK_N // 16, 2 * BLOCK_M)


@triton.jit
def _merged(x, ONES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Bits of the left half of int16 [ROWS, COLS] where `ONES` has ones, else of the right half."""
    left, right = halves(x, ROWS, COLS)  # [ROWS, COLS / 2] each
    # 0xe4 is (first & third) | (second & ~third).
    return tl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, " + ONES + ", 0xe4;",
        "=r,r,r", [left, right], tl.int16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def sign_words(x, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """Words of the signs of x [BLOCK_N, BLOCK_M]: int16 [BLOCK_N / 16 (w), BLOCK_M].

    Columns are (r, block, c).
    """
    # [w, i, r, block, j, c]
    bits = (x > 0).to(tl.int32).reshape(BLOCK_N // 16, 2, 8, BLOCK_M // SIDE, 8, 8)
    # Bits j of a byte, then bytes i of a word.
    bits = tl.sum(bits << tl.arange(0, 8)[None, None, None, None, :, None], 4)
    words = tl.sum(bits << (8 * tl.arange(0, 2))[None, :, None, None, None], 1)
    return words.reshape(BLOCK_N // 16, BLOCK_M).to(tl.int16)


@triton.jit
def store_signs(
    signs,
    words,
    row,
    col,
    k_length,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PTX: tl.constexpr,
):
    """Store the words of a tile of one head at query `row` and key `col`; `signs` is int16."""
    line = key_blocks(k_length)
    block = row // SIDE * line.to(tl.int64) + col // SIDE
    w = tl.arange(0, BLOCK_N // 16)[:, None]  # [BLOCK_N / 16, 1]
    at = tl.arange(0, BLOCK_M)[None, :]  # [1, BLOCK_M]
    # The columns of `sign_words`.
    r, g, c = at // (BLOCK_M // 8), at // 8 % (BLOCK_M // SIDE), at % 8
    places = (g * line + w // 4) * WORDS + c * 32 + r // 2 * 8 + w % 4 * 2 + r % 2
    pointers = signs + block * WORDS + places
    if PTX:
        # Store from the registers that hold the words; `tl.store` would exchange them first.
        tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            mov.b32 {low, high}, $4;
            st.global.b16 [$2], low;
            st.global.b16 [$3], high;
            mov.b32 $0, 0;
            mov.b32 $1, 0;
            }""",
            "=r,=r,l,l,r", [pointers, words], tl.int32, is_pure=False, pack=2,
        )  # fmt: skip
    else:
        tl.store(pointers, words)


@triton.jit
def sign_quarters(signs, row, col, k_length, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pointers to groups of four pairs of words of a tile of one head; `signs` is int32.

    Their shape is [block, c, block, r // 2]. The next key tile is `2 * BLOCK_N` further.
    """
    line = key_blocks(k_length)
    block = row // SIDE * line.to(tl.int64) + col // SIDE
    # Blocks of the tile, and within a block the 16 bytes of (c, r // 2).
    blocks = tl.arange(0, BLOCK_M // SIDE)[:, None] * line + tl.arange(0, BLOCK_N // SIDE)[None, :]
    quarters = tl.arange(0, 8)[:, None] * 16 + tl.arange(0, 4)[None, :] * 4
    places = blocks[:, None, :, None] * PAIRS + quarters[None, :, None, :]
    return signs + block * PAIRS + places


@triton.jit
def load_signs(pointers, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PTX: tl.constexpr):
    """Pairs of words of a tile, loaded from the pointers of `sign_quarters`.

    They broadcast with [block, j, c, block, w, i, r // 2, r % 2], the dimensions of
    [BLOCK_M, BLOCK_N].
    """
    GROUPS: tl.constexpr = BLOCK_M // SIDE
    BLOCKS: tl.constexpr = BLOCK_N // SIDE
    if PTX:
        # Load 16 bytes per thread straight into the registers that need them, which takes fewer
        # instructions than through shared memory, and prefetch the words of later tiles.
        first, second, third, fourth = tl.inline_asm_elementwise(
            """{
            ld.global.v4.b32 {$0, $1, $2, $3}, [$4];
            prefetch.global.L2 [$4 + 2048];
            }""",
            "=r,=r,=r,=r,l", [pointers], (tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True, pack=1,
        )  # fmt: skip
        words = tl.join(tl.join(first, third), tl.join(second, fourth))
        words = words.reshape(GROUPS, 8, BLOCKS, 4, 4)
    else:
        words = tl.load(pointers[:, :, :, :, None] + tl.arange(0, 4))
    words = words.permute(0, 1, 2, 4, 3)
    return words.reshape(GROUPS, 1, 8, BLOCKS, 4, 1, 4, 1)


@triton.jit
def sign_bits(words, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Whether each weight of a tile is positive, [BLOCK_M, BLOCK_N], from `load_signs`."""
    j = tl.arange(0, 8)[None, :, None, None, None, None, None, None]
    i = tl.arange(0, 2)[None, None, None, None, None, :, None, None]
    odd = tl.arange(0, 2)[None, None, None, None, None, None, None, :]
    # [block, j, c, block, w, i, r // 2, r % 2] is [BLOCK_M, BLOCK_N].
    return ((words >> (16 * odd + 8 * i + j)) & 1).reshape(BLOCK_M, BLOCK_N) != 0


@triton.jit
def sign_gated(grad, words, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """`grad` in bfloat16 where `sign_bits` is true, else 0; two values at once.

    Bit 16 (r % 2) + 8 i + j is shifted to the top of its byte. `prmt` then spreads it over two
    bytes: selector 8 + n copies the sign of byte n, and bytes 4 to 7 are those of the second word.
    The selectors are compile-time constants, so one instruction is left.
    """
    GROUPS: tl.constexpr = BLOCK_M // SIDE
    BLOCKS: tl.constexpr = BLOCK_N // SIDE
    j = tl.arange(0, 8)[None, :, None, None, None, None, None, None]
    i = tl.arange(0, 2)[None, None, None, None, None, :, None, None]
    odd = tl.arange(0, 2)[None, None, None, None, None, None, None, :]
    # Bit j of every byte at its top.
    ends = (words << (7 - j)).broadcast_to(GROUPS, 8, 8, BLOCKS, 4, 2, 4, 2)
    # The selector of one byte, for both bytes of a bfloat16 value.
    twice = (0x88 + 0x11 * i + 0x22 * odd).broadcast_to(GROUPS, 8, 8, BLOCKS, 4, 2, 4, 2)
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 gate, bytes;
        shl.b32 bytes, $6, 8;
        or.b32 bytes, bytes, $5;
        or.b32 bytes, bytes, 0x4400;
        prmt.b32 gate, $3, $4, bytes;
        cvt.rn.bf16x2.f32 $0, $2, $1;
        and.b32 $0, $0, gate;
        }""",
        "=r,r,r,r,r,r,r",
        [grad, ends.reshape(BLOCK_M, BLOCK_N), twice.reshape(BLOCK_M, BLOCK_N)],
        tl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip
