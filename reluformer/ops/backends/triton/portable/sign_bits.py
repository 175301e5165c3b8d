"""Signs of weights, a bit each, that `keys_kernel` leaves to `queries_kernel`.

A block of 64 queries and 64 keys is 512 bytes on end. Query 8 j + c and key 16 w + 8 i + r have
bit 8 i + j of the 16-bit word at [c, r // 2, w, r % 2]. In the layout of a product's result
(neighbours of a row in a register, then rows 8 apart, then columns 8, 16, 32 apart) a thread whose
rows are keys has all bits of the words it has any of: it makes them without exchange. A thread
whose rows are queries has two of every j, all of i and w and a pair of r, so it finds what it needs
in 16 bytes, and its pair of keys in the halves of one 32-bit word, 16 bits apart.
"""

import triton
import triton.language as tl

from reluformer.ops.backends.triton.portable.device import BLOCK, halves

# Queries and keys of a block, its words and pairs of words, and keys of the largest tile. Readers
# run ahead of their tile by up to `SLACK` blocks, so that many follow the last.
SIDE = tl.constexpr(64)
WORDS = tl.constexpr(256)
PAIRS = tl.constexpr(128)
WIDEST = tl.constexpr(128)
SLACK = 8


@triton.jit
def key_blocks(k_length):
    """Blocks of a line of them: whole tiles of keys, so that a tile needs no mask."""
    return tl.cdiv(k_length, WIDEST) * (WIDEST // SIDE)


@triton.jit
def head_blocks(q_length, k_length):
    """Blocks of a head: whole tiles of queries and keys."""
    return tl.cdiv(q_length, BLOCK) * (BLOCK // SIDE) * key_blocks(k_length)


@triton.jit
def positive(packed):
    """All ones where a bfloat16 is positive, else 0, two at once: int16."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 zero; mov.b32 zero, 0; set.gt.u32.bf16x2 $0, $1, zero; }",
        "=r,r", [packed], tl.int16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def gated(grad, gates):
    """`grad` in bfloat16 where `gates` are ones, 0 where they are 0, two values at once.

    No score need be kept until its gradient arrives.
    """
    return tl.inline_asm_elementwise(
        "{ cvt.rn.bf16x2.f32 $0, $2, $1; and.b32 $0, $0, $3; }",
        "=r,r,r,r", [grad, gates], tl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def gate_words(gates, KEYS: tl.constexpr, QUERIES: tl.constexpr):
    """`sign_words` of `positive` weights [KEYS, QUERIES]: a bit is taken of every gate."""
    lines: tl.constexpr = KEYS * (QUERIES // SIDE)
    words = _merged(gates.reshape(lines, SIDE), "0x0f0f0f0f", lines, SIDE)
    words = _merged(words, "0x33333333", lines, SIDE // 2)
    words = _merged(words, "0x55555555", lines, SIDE // 4)
    words = words.reshape(KEYS // 16, 2 * QUERIES)
    return _merged(words, "0x00ff00ff", KEYS // 16, 2 * QUERIES)


@triton.jit
def _merged(x, ONES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Bits of the left half of int16 [ROWS, COLS] where the mask has ones, else of the right."""
    left, right = halves(x, ROWS, COLS)
    # 0xe4 is (first & third) | (second & ~third).
    return tl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, " + ONES + ", 0xe4;",
        "=r,r,r", [left, right], tl.int16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def sign_words(x, KEYS: tl.constexpr, QUERIES: tl.constexpr):
    """Which of x [KEYS, QUERIES] are positive: words, int16 [KEYS / 16 (w), QUERIES].

    Columns are (r, block, c).
    """
    bits = (x > 0).to(tl.int32).reshape(KEYS // 16, 2, 8, QUERIES // SIDE, 8, 8)
    bits = tl.sum(bits << tl.arange(0, 8)[None, None, None, None, :, None], 4)
    words = tl.sum(bits << (8 * tl.arange(0, 2))[None, :, None, None, None], 1)
    return words.reshape(KEYS // 16, QUERIES).to(tl.int16)


@triton.jit
def store_signs(
    signs, words, row, col, k_length, KEYS: tl.constexpr, QUERIES: tl.constexpr, PTX: tl.constexpr
):
    """Write words of a tile of one head, at query `row` and key `col`; `signs` are int16."""
    line = key_blocks(k_length)
    block = row // SIDE * line.to(tl.int64) + col // SIDE
    w = tl.arange(0, KEYS // 16)[:, None]
    at = tl.arange(0, QUERIES)[None, :]
    r, g, c = at // (QUERIES // 8), at // 8 % (QUERIES // SIDE), at % 8
    places = (g * line + w // 4) * WORDS + c * 32 + r // 2 * 8 + w % 4 * 2 + r % 2
    pointers = signs + block * WORDS + places
    if PTX:
        # From the registers they are in: for `tl.store` threads would exchange words first.
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
def sign_quarters(signs, row, col, k_length, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """Where pairs of words of a tile of one head lie, by four; `signs` are int32 here.

    [block, c, block, r // 2]; the next tile of keys is `2 * KEYS` further.
    """
    line = key_blocks(k_length)
    block = row // SIDE * line.to(tl.int64) + col // SIDE
    blocks = tl.arange(0, QUERIES // SIDE)[:, None] * line + tl.arange(0, KEYS // SIDE)[None, :]
    quarters = tl.arange(0, 8)[:, None] * 16 + tl.arange(0, 4)[None, :] * 4
    places = blocks[:, None, :, None] * PAIRS + quarters[None, :, None, :]
    return signs + block * PAIRS + places


@triton.jit
def load_signs(pointers, QUERIES: tl.constexpr, KEYS: tl.constexpr, PTX: tl.constexpr):
    """Pairs of words of a tile, from `sign_quarters`.

    Shaped to broadcast with [block, j, c, block, w, i, r // 2, r % 2], which is [QUERIES, KEYS].
    """
    GROUPS: tl.constexpr = QUERIES // SIDE
    BLOCKS: tl.constexpr = KEYS // SIDE
    if PTX:
        # All that a thread needs, into the registers where it needs it: through shared memory
        # takes more instructions. Words of later tiles are called from memory meanwhile.
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
def sign_bits(words, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """Whether the weights of a tile were positive, [QUERIES, KEYS], from `load_signs`."""
    j = tl.arange(0, 8)[None, :, None, None, None, None, None, None]
    i = tl.arange(0, 2)[None, None, None, None, None, :, None, None]
    odd = tl.arange(0, 2)[None, None, None, None, None, None, None, :]
    return ((words >> (16 * odd + 8 * i + j)) & 1).reshape(QUERIES, KEYS) != 0


@triton.jit
def sign_gated(grad, words, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """`grad` in bfloat16 where `sign_bits`, else 0, two values at once.

    Bit 16 (r % 2) + 8 i + j moves to the end of its byte, from where a permutation of bytes can
    spread it (8 plus the number of a byte chooses copies of its sign, numbers from 4 on are those
    of the second word). Which bytes are constants of the program, so that one instruction is left.
    """
    GROUPS: tl.constexpr = QUERIES // SIDE
    BLOCKS: tl.constexpr = KEYS // SIDE
    j = tl.arange(0, 8)[None, :, None, None, None, None, None, None]
    i = tl.arange(0, 2)[None, None, None, None, None, :, None, None]
    odd = tl.arange(0, 2)[None, None, None, None, None, None, None, :]
    ends = (words << (7 - j)).broadcast_to(GROUPS, 8, 8, BLOCKS, 4, 2, 4, 2)
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
        [grad, ends.reshape(QUERIES, KEYS), twice.reshape(QUERIES, KEYS)],
        tl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip
