"""Device functions that the portable kernels share.

`row` counts the queries of a sequence and `col` its keys. The query at `row` has the key position
`row + offset` with `offset = Tk - Tq`, so causal attention is aligned at the end of the keys.
Tiles are loaded through a tensor descriptor (`TMA`) or from a pointer with strides.
"""

import triton
import triton.language as tl

from reluformer.ops.backends.triton.portable.arguments import Sequence
from reluformer.ops.stats import ENTROPY_BLOCK

LN2 = tl.constexpr(0.6931471805599453)
# Rows of a block in tables of row terms and in sampled entropies; no tile has more rows.
BLOCK = tl.constexpr(ENTROPY_BLOCK)


@triton.jit
def load_tile(
    src,
    batch,
    head,
    row,
    strides,
    limit,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WIDTH: tl.constexpr,
    TMA: tl.constexpr,
    CHECK: tl.constexpr,
):
    """Load rows `row .. row + ROWS` of one head as [ROWS, COLS], with zeros from column `WIDTH` on.

    With `CHECK`, rows from `limit` on are zero. A descriptor returns zeros past the tensor anyway.
    """
    if TMA:
        # The block of the descriptor is [1, 1, ROWS, COLS].
        tile = src.load([batch, head, row, 0]).reshape(ROWS, COLS)
    else:
        rows = row + tl.arange(0, ROWS)  # [ROWS]
        cols = tl.arange(0, COLS)  # [COLS]
        # 64-bit offsets: a tensor may have more than 2^31 elements.
        base = src + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
        pointers = base + rows.to(tl.int64)[:, None] * strides[2] + cols[None, :]  # [ROWS, COLS]
        if CHECK and COLS != WIDTH:
            tile = tl.load(
                pointers, mask=(rows < limit)[:, None] & (cols < WIDTH)[None, :], other=0.0
            )
        elif CHECK:
            tile = tl.load(pointers, mask=(rows < limit)[:, None], other=0.0)
        elif COLS != WIDTH:
            tile = tl.load(pointers, mask=(cols < WIDTH)[None, :], other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def store_tile(
    dst,
    tile,
    batch,
    head,
    row,
    strides,
    limit,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WIDTH: tl.constexpr,
    TMA: tl.constexpr,
):
    """Store a tile [ROWS, COLS] of one head, without rows from `limit` or columns from `WIDTH` on.

    A descriptor clips at the end of the tensor only, so `TMA` requires that `limit` is that end.
    """
    if TMA:
        dst.store([batch, head, row, 0], tile.reshape(1, 1, ROWS, COLS))
    else:
        rows = row + tl.arange(0, ROWS)  # [ROWS]
        cols = tl.arange(0, COLS)  # [COLS]
        # 64-bit offsets: a tensor may have more than 2^31 elements.
        base = dst + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
        pointers = base + rows.to(tl.int64)[:, None] * strides[2] + cols[None, :]  # [ROWS, COLS]
        tl.store(pointers, tile, mask=(rows < limit)[:, None] & (cols < WIDTH)[None, :])


@triton.jit
def keep_rows(tile, row, limit, ROWS: tl.constexpr):
    """Set the rows of a tile from `limit` on to zero.

    A zero weight does not hide a NaN in the padding, because 0 * NaN is NaN.
    """
    rows = row + tl.arange(0, ROWS)  # [ROWS]
    return tl.where((rows < limit)[:, None], tile, tl.zeros_like(tile))


@triton.jit
def valid_keys(key_lengths, b, n_k):
    """Number of valid keys of sequence `b`, in [0, n_k], so that no access leaves the tensor."""
    # Clamped before the conversion: an int64 length may exceed 2^31.
    return tl.minimum(tl.maximum(tl.load(key_lengths + b), 0), n_k).to(tl.int32)


@triton.jit
def load_sequence(b, optional, q_length, k_length, CONFIG: tl.constexpr):
    """Lengths and positions of sequence `b`, packed or dense, as a `Sequence`."""
    if CONFIG.PACKED:
        first_q = tl.load(optional.cu_q + b).to(tl.int32)
        first_k = tl.load(optional.cu_k + b).to(tl.int32)
        n_q = tl.load(optional.cu_q + b + 1).to(tl.int32) - first_q
        n_k = tl.load(optional.cu_k + b + 1).to(tl.int32) - first_k
        # Packed tensors are seen as one batch, [1, H, N, D].
        batch = b * 0
    else:
        # Zeros of the type of b: both branches must return the same types.
        first_q = b * 0
        first_k = b * 0
        n_q = q_length
        n_k = k_length
        batch = b
    end = n_k
    if CONFIG.HAS_LENGTHS:
        end = valid_keys(optional.key_lengths, b, n_k)
    return Sequence(batch, first_q, first_k, n_q, n_k, end)


@triton.jit
def visible(position, row, col, end, window, n_q, mask, CONFIG: tl.constexpr):
    """Whether query `row`, at key position `position`, sees key `col`; shapes broadcast."""
    # position and row [BLOCK_M, 1] with col [1, BLOCK_N], or transposed.
    seen = (col < end) & (row < n_q)
    if CONFIG.CAUSAL:
        seen = seen & (col <= position)
    if CONFIG.WINDOW:
        seen = seen & (col > position - window)
        if not CONFIG.CAUSAL:
            seen = seen & (col < position + window)
    if CONFIG.HAS_MASK:
        pointers = (
            mask.pointer + row.to(tl.int64) * mask.stride_q + col.to(tl.int64) * mask.stride_k
        )
        # Pairs that are already invisible are not loaded.
        seen = seen & (tl.load(pointers, mask=seen, other=0) != 0)
    return seen


@triton.jit
def visible_count(position, end, window, CONFIG: tl.constexpr):
    """Number of keys that a query at `position` sees, in closed form, as float32."""
    # Keys [low, high) are visible; shapes are those of `position`.
    high = position * 0 + end
    low = position * 0
    if CONFIG.CAUSAL:
        high = tl.minimum(high, position + 1)
    if CONFIG.WINDOW:
        low = tl.maximum(low, position - window + 1)
        if not CONFIG.CAUSAL:
            high = tl.minimum(high, position + window)
    return tl.maximum(high - low, 0).to(tl.float32)


@triton.jit
def row_places(batch, h, rows, stride_b, stride_h, stride_t):
    """Offsets of rows in tensors with one value per row, such as the row sums."""
    # [rows], 64-bit
    head = batch.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
    return head + rows.to(tl.int64) * stride_t


@triton.jit
def row_factor(n, gamma, h, numbers, CONFIG: tl.constexpr):
    """C_i = unit / (gamma_h * (n_i / 2)^length_exponent), zero for rows that see no key."""
    # (n / 2)^-e by the hardware's exp2 and log2.
    factor = numbers.unit * tl.exp2(-numbers.length_exponent * tl.log2(tl.maximum(n, 1.0) * 0.5))
    if CONFIG.HAS_GAMMA:
        factor = factor / tl.load(gamma + h).to(tl.float32)
    return tl.where(n > 0, factor, 0.0)


@triton.jit
def head_threshold(threshold, numbers, inverse_scale, h, CONFIG: tl.constexpr):
    """The threshold of head `h` in the units of the scores that the loop computes."""
    value = tl.load(threshold + h).to(tl.float32) if CONFIG.THRESHOLD_TENSOR else numbers.threshold
    return value * inverse_scale


@triton.jit
def raised(x, POWER: tl.constexpr):
    """x^POWER for a power of `reluformer.ops.rule.POWERS` (1, 2, 4, 8) or one less."""
    # Products of squares: one to three multiplications.
    if POWER == 1:
        result = x
    elif POWER == 2:
        result = x * x
    elif POWER == 3:
        result = x * x * x
    elif POWER == 4:
        result = (x * x) * (x * x)
    else:
        square = x * x
        fourth = square * square
        result = fourth * fourth if POWER == 8 else fourth * square * x
    return result


@triton.jit
def relu(x):
    """max(x, 0); NaN stays NaN."""
    # Costs nothing: `.NAN` is a modifier of the GPU's instruction. Without it NaN becomes 0 on a
    # GPU and, since Triton 3.8, in the interpreter.
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def rectified(x, dtype: tl.constexpr, PTX: tl.constexpr):
    """max(x, 0) in `dtype`.

    The GPU rectifies and packs two values in one instruction that the compiler does not emit.
    """
    # Two values per instruction (pack=2); $1 is the lower half of the result.
    if PTX and dtype == tl.bfloat16:
        result = tl.inline_asm_elementwise(
            "cvt.rn.relu.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], tl.bfloat16, is_pure=True, pack=2
        )
    elif PTX and dtype == tl.float16:
        result = tl.inline_asm_elementwise(
            "cvt.rn.relu.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], tl.float16, is_pure=True, pack=2
        )
    else:
        result = relu(x).to(dtype)
    return result


@triton.jit
def halves(x, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The left and right half of a tile [ROWS, COLS], each [ROWS, COLS / 2]."""
    # [ROWS, 2, COLS / 2] -> [ROWS, COLS / 2, 2]
    return tl.split(tl.permute(x.reshape(ROWS, 2, COLS // 2), (0, 2, 1)))


@triton.jit
def folded(x, ROWS: tl.constexpr, COLS: tl.constexpr, TO: tl.constexpr):
    """Sum equal column blocks of a float32 tile [ROWS, COLS] into [ROWS, TO].

    Unlike `tl.sum`, it adds values of one thread only: totals over many tiles need no shuffles.
    """
    if COLS > TO:
        left, right = halves(x, ROWS, COLS)  # [ROWS, COLS / 2] each
        x = folded(left + right, ROWS, COLS // 2, TO)
    return x


@triton.jit
def folded_pairs(x, ROWS: tl.constexpr, COLS: tl.constexpr, TO: tl.constexpr):
    """`folded` for a bfloat16 tile: adds packed pairs in bfloat16, then converts to float32."""
    if COLS > TO:
        left, right = halves(x, ROWS, COLS)  # [ROWS, COLS / 2] each
        x = folded_pairs(_add_pairs(left, right), ROWS, COLS // 2, TO)
    else:
        x = widened(x)
    return x


@triton.jit
def _add_pairs(a, b):
    return tl.inline_asm_elementwise(
        "add.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit
def widened(x):
    """A bfloat16 tile in float32 with one instruction per value; the compiler needs more."""
    return tl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
        "=r,=r,r",
        [x],
        tl.float32,
        is_pure=True,
        pack=2,
    )


@triton.jit
def log2_positive(x, PTX: tl.constexpr):
    """log2(x), where x below the smallest normal number counts as that number.

    Its factor is 0 there. Uses the hardware approximation where inline PTX is available.
    """
    # The smallest normal float32 number.
    safe = tl.maximum(x, 1.1754943508222875e-38)
    if PTX:
        result = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [safe], tl.float32, is_pure=True, pack=1
        )
    else:
        result = tl.log2(safe)
    return result


@triton.jit
def with_scalar(mask, condition):
    """`mask` where the scalar `condition` holds, else false everywhere.

    Triton's interpreter broadcasts a scalar comparison as int32, which its loads and stores refuse
    as a mask since 3.9. The comparison makes it int1 again; the compiler removes it.
    """
    return (mask & condition) != 0


@triton.jit
def entropy_wanted(row, h, b, CONFIG: tl.constexpr):
    """Whether the tile that begins at `row` has sums of w log w: `stats.sampled_rows`.

    A tile has at most `BLOCK` rows, so the answer holds for all of its rows.
    """
    return (row // BLOCK + h + b) % CONFIG.ENTROPY_EVERY == 0


@triton.jit
def padded_rows(q_length):
    """Rows per head in tables of row terms: whole blocks, so that loads need no mask."""
    return tl.cdiv(q_length, BLOCK) * BLOCK


@triton.jit
def dropout_keys(seed, rows, bh):
    """Random bits for each row of a head, uint32, the row part of `dropout_factor`."""
    # One Philox counter per (row, head).
    head = rows * 0 + bh
    bits, _, _, _ = tl.philox(seed, rows, head, rows * 0, rows * 0)
    return bits.to(tl.uint32)


@triton.jit
def dropout_factor(keys, col, probability):
    """0 or 1 / (1 - probability) per pair, a function of (seed, head, row, column) only.

    Philox for every pair would cost many times the attention itself. Each row gets bits from
    Philox, and each pair mixes them with its column (Wellons' lowbias32, two multiplications).
    """
    bits = keys ^ (col.to(tl.uint32) * 0x9E3779B1)
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    bits = bits ^ (bits >> 16)
    # The upper 24 bits are exact in float32.
    kept = (bits >> 8).to(tl.float32) * (1.0 / 16777216.0) >= probability
    return tl.where(kept, 1.0 / (1.0 - probability), 0.0)


@triton.jit
def key_range(row, rows_end, offset, end, window, UNIT: tl.constexpr, TAIL: tl.constexpr,
              CONFIG: tl.constexpr):  # fmt: skip
    """Keys that the query rows [row, rows_end) see: (low, inner_low, inner_high, high).

    All bounds but `high` are multiples of `UNIT` keys. Every row sees all keys of the tiles in
    [inner_low, inner_high); other tiles need a mask. Without `TAIL`, the last, partial tile counts
    as whole unless the causal edge cuts it off: its missing keys must be loaded as zeros.
    """
    # Key positions of the first and the last row.
    first = row + offset
    last = rows_end - 1 + offset
    low = row * 0
    inner_low = row * 0
    high = end
    inner_high = end // UNIT * UNIT if TAIL else tl.cdiv(end, UNIT) * UNIT
    if CONFIG.CAUSAL:
        # The last row sees most keys; all rows see the keys of the first.
        high = tl.minimum(high, tl.maximum(last + 1, 0))
        inner_high = tl.minimum(inner_high, tl.maximum(first + 1, 0) // UNIT * UNIT)
    if CONFIG.WINDOW:
        # The first row sees the earliest keys; all rows see the earliest keys of the last.
        low = tl.maximum(first - window + 1, 0) // UNIT * UNIT
        inner_low = tl.cdiv(tl.maximum(last - window + 1, 0), UNIT) * UNIT
        if not CONFIG.CAUSAL:
            high = tl.minimum(high, tl.maximum(last + window, 0))
            inner_high = tl.minimum(inner_high, tl.maximum(first + window, 0) // UNIT * UNIT)
    return low, inner_low, tl.maximum(inner_low, inner_high), high


@triton.jit
def query_range(col, cols_end, offset, n_q, window, CONFIG: tl.constexpr):
    """Query rows that see the keys [col, cols_end), as in `key_range`; empty without keys."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    last = cols_end - 1
    low = col * 0
    inner_low = col * 0
    high = tl.where(col < cols_end, n_q, 0)
    inner_high = high // BLOCK_M * BLOCK_M if CONFIG.PACKED else tl.cdiv(high, BLOCK_M) * BLOCK_M
    if CONFIG.CAUSAL:
        # The first key is seen from its own position on, all keys from that of the last.
        low = tl.maximum(col - offset, 0) // BLOCK_M * BLOCK_M
        inner_low = tl.cdiv(tl.maximum(last - offset, 0), BLOCK_M) * BLOCK_M
    if CONFIG.WINDOW:
        high = tl.minimum(high, tl.maximum(last + window - offset, 0))
        inner_high = tl.minimum(
            inner_high, tl.maximum(col + window - offset, 0) // BLOCK_M * BLOCK_M
        )
        if not CONFIG.CAUSAL:
            low = tl.maximum(col - window + 1 - offset, 0) // BLOCK_M * BLOCK_M
            inner_low = tl.cdiv(tl.maximum(last - window + 1 - offset, 0), BLOCK_M) * BLOCK_M
    return low, inner_low, tl.maximum(inner_low, inner_high), high


@triton.jit
def loop_bounds(low, inner_low, inner_high, high, PART: tl.constexpr, SINGLE: tl.constexpr):
    """(start, stop) of the loop before (0), over (1) or after (2) the tiles that are seen whole.

    With `SINGLE` there is one loop over all tiles.
    """
    # `PART` and `SINGLE` are compile-time constants: one branch is compiled.
    if SINGLE:
        start = low
        stop = high
    elif PART == 0:
        start = low
        stop = tl.minimum(inner_low, high)
    elif PART == 1:
        start = inner_low
        stop = inner_high
    else:
        start = inner_high
        stop = high
    return start, stop
