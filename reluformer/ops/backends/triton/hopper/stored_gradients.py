"""Score gradients in global memory, which the dK/dV kernel stores for a dQ kernel of one product.

A block of 64 queries and 64 keys takes 8 KiB. Blocks lie [head, key block, query block]. With
COMPACT, the blocks of queries that causality hides all keys of a block from have no memory. The
gradient of query 16 m + 8 j + 2 c + e and key 16 w + 8 i + r is element [w, m, r, c, j, i, e] of
its block, in bfloat16.

In the dK/dV kernel, thread (r, c) of warp w holds it in a pair of queries, and its registers have
the order in which a product takes its left operand: 16 bytes are stored at a time without moving
them. In the dQ kernel (`backward_dq_product.py`), thread (r, c) of warp m loads the same 16 bytes.
There a product takes pairs of keys, so each warp transposes its 8 x 8 matrices.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Queries and keys of a block, and its size in pairs.
SIDE = gl.constexpr(64)
PAIRS = gl.constexpr(2048)


@gluon.jit
def missing_blocks(key_block, sizes):
    """Number of query blocks before the first that sees a key of a key block.

    With more queries than keys it is smaller: the queries that see no key at all are not left out.
    """
    seen_by_all = (gl.maximum(sizes.n_k - sizes.n_q, 0) + SIDE - 1) // SIDE
    return gl.maximum(key_block - seen_by_all, 0)


@gluon.jit
def gradient_block(gradients, head, tile, key, sizes, COMPACT: gl.constexpr):
    """Pointer to the block of query tile `tile` of query head `head` and the keys from `key`."""
    block = head.to(gl.int64) * sizes.head_blocks + key // SIDE * (sizes.term_rows // SIDE) + tile
    if COMPACT:
        # 1 + 2 + ... + count blocks are missing before the first one of this key block.
        count = missing_blocks(key // SIDE, sizes)
        block -= count * (count + 1) // 2
    return gradients + block * PAIRS


@gluon.jit
def store_gradients(ds, block, condition):
    """Store a block of score gradients.

    Args:
        ds: pairs of dS^T [64 keys, 32 pairs of queries].
        block: pointer from `gradient_block`, to int32.
        condition: scalar condition of the store.
    """
    # [w, i, r, m, j, c] -> [w, m, r, c, j, i]
    ds = gl.permute(gl.reshape(ds, [4, 2, 8, 4, 2, 4]), (0, 3, 2, 5, 4, 1))
    ds = gl.reshape(ds, [512, 4])
    layout: gl.constexpr = ds.type.layout
    pieces = gl.arange(0, 512, gl.SliceLayout(1, layout))[:, None]
    places = block + (pieces * 4 + gl.arange(0, 4, gl.SliceLayout(0, layout))[None, :])
    gl.store(places, ds, mask=condition)


@gluon.jit
def load_gradients(tile, ROWS: gl.constexpr):
    """Pairs of dS [ROWS queries, 32 pairs of keys] from ROWS / 64 blocks [ROWS, 64]."""
    # 16 bytes per thread; a warp reads 512 contiguous bytes, those of one (w, m).
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    x = gl.reshape(tile.load(layout), [ROWS // SIDE, 4, 4, 8, 4, 2, 2, 2])
    even, odd = gl.split(x)  # [block, w, m, r, c, j, i]
    # Row r and pair c become query r and pair c of keys.
    pairs = gl.inline_asm_elementwise(
        """{
        .reg .b32 pair;
        mov.b32 pair, {$1, $2};
        movmatrix.sync.aligned.m8n8.trans.b16 $0, pair;
        }""",
        "=r,h,h", [even, odd], gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    # [block, w, m, r, c, j, i] -> [block, m, j, r, w, i, c]
    return gl.reshape(gl.permute(pairs, (0, 2, 5, 3, 1, 6, 4)), [ROWS, SIDE // 2])


@gluon.jit
def mask_pairs(pairs, bounds, col, CAUSAL: gl.constexpr):
    """Pairs [queries, pairs of keys from `col` on], 0 where a key does not exist or is not visible.

    Blocks of keys that no row sees are not written and may hold NaN.
    """
    layout: gl.constexpr = pairs.type.layout
    cols = (col + 2 * gl.arange(0, pairs.shape[1], gl.SliceLayout(0, layout)))[None, :]
    ends = bounds.end
    if CAUSAL:
        rows = gl.arange(0, pairs.shape[0], gl.SliceLayout(1, layout))
        ends = gl.minimum(bounds.row + bounds.offset + 1 + rows, bounds.end)[:, None]
    # The even key is in the low half.
    return gl.where(cols + 1 < ends, pairs, gl.where(cols < ends, pairs & 0xFFFF, 0))
