"""Device functions that the forward and backward kernels share.

Positions: `row` counts the queries of a sequence, `col` its keys, and a query at `row` stands at
key position `row + offset` with `offset = Tk - Tq`, so that causal attention is aligned at the end.
Tiles come from a tensor descriptor (`TMA`) or from a pointer with strides: one kernel, two loads.
"""

import triton
import triton.language as tl

from reluformer.ops.stats import ENTROPY_BLOCK

LN2 = tl.constexpr(0.6931471805599453)
BLOCK = tl.constexpr(ENTROPY_BLOCK)

# Arguments whose divisibility must not choose another compilation: they change with the lengths.
LENGTH_DEPENDENT = [
    "q_length",
    "k_length",
    "window",
    "heads",
    "stride_mb",
    "stride_mh",
    "stride_mq",
    "stride_sb",
    "stride_sh",
    "stride_st",
]


@triton.jit
def load_tile(
    src,
    batch,
    head,
    row,
    stride_b,
    stride_h,
    stride_t,
    limit,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WIDTH: tl.constexpr,
    TMA: tl.constexpr,
    CHECK: tl.constexpr,
):
    """Rows `row .. row + ROWS` of one head, [ROWS, COLS]; zeros past `WIDTH` columns.

    With `CHECK` rows from `limit` on are zeros; a descriptor gives zeros past the tensor anyway.
    """
    if TMA:
        tile = src.load([batch, head, row, 0]).reshape(ROWS, COLS)
    else:
        rows = row + tl.arange(0, ROWS)
        cols = tl.arange(0, COLS)
        base = src + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
        pointers = base + rows.to(tl.int64)[:, None] * stride_t + cols[None, :]
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
    stride_b,
    stride_h,
    stride_t,
    limit,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WIDTH: tl.constexpr,
    TMA: tl.constexpr,
):
    """Write [ROWS, COLS] to one head; nothing at or past row `limit` nor past `WIDTH` columns.

    A descriptor only knows the end of the tensor: use it where `limit` is that end.
    """
    if TMA:
        dst.store([batch, head, row, 0], tile.reshape(1, 1, ROWS, COLS))
    else:
        rows = row + tl.arange(0, ROWS)
        cols = tl.arange(0, COLS)
        base = dst + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
        pointers = base + rows.to(tl.int64)[:, None] * stride_t + cols[None, :]
        tl.store(pointers, tile, mask=(rows < limit)[:, None] & (cols < WIDTH)[None, :])


@triton.jit
def keep_rows(tile, row, limit, ROWS: tl.constexpr):
    """The tile with rows from `limit` on set to zero.

    0 * NaN is NaN: a zero weight is not enough to keep what padding holds out of a product.
    """
    rows = row + tl.arange(0, ROWS)
    return tl.where((rows < limit)[:, None], tile, tl.zeros_like(tile))


@triton.jit
def sequence(
    b,
    cu_q,
    cu_k,
    lengths,
    q_length,
    k_length,
    VARLEN: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
):
    """(batch index, first query row, first key row, Tq, Tk, keys that exist) of sequence `b`."""
    if VARLEN:
        first_q = tl.load(cu_q + b).to(tl.int32)
        first_k = tl.load(cu_k + b).to(tl.int32)
        n_q = tl.load(cu_q + b + 1).to(tl.int32) - first_q
        n_k = tl.load(cu_k + b + 1).to(tl.int32) - first_k
        batch = b * 0
    else:
        first_q = b * 0
        first_k = b * 0
        n_q = q_length
        n_k = k_length
        batch = b
    end = n_k
    if HAS_LENGTHS:
        end = tl.minimum(tl.maximum(tl.load(lengths + b).to(tl.int32), 0), n_k)
    return batch, first_q, first_k, n_q, n_k, end


@triton.jit
def visible(
    position,
    row,
    col,
    end,
    window,
    mask,
    stride_mq,
    stride_mk,
    n_q,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_MASK: tl.constexpr,
):
    """Whether key `col` is seen from query `row`, which stands at `position`; shapes broadcast."""
    seen = (col < end) & (row < n_q)
    if CAUSAL:
        seen = seen & (col <= position)
    if WINDOW:
        seen = seen & (col > position - window)
        if not CAUSAL:
            seen = seen & (col < position + window)
    if HAS_MASK:
        pointers = mask + row.to(tl.int64) * stride_mq + col.to(tl.int64) * stride_mk
        seen = seen & (tl.load(pointers, mask=seen, other=0) != 0)
    return seen


@triton.jit
def visible_count(position, end, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """How many keys a query at `position` sees, in closed form, as float32."""
    high = position * 0 + end
    low = position * 0
    if CAUSAL:
        high = tl.minimum(high, position + 1)
    if WINDOW:
        low = tl.maximum(low, position - window + 1)
        if not CAUSAL:
            high = tl.minimum(high, position + window)
    return tl.maximum(high - low, 0).to(tl.float32)


@triton.jit
def row_places(batch, h, rows, stride_sb, stride_sh, stride_st):
    """Where the values of rows lie: offsets into row sums and what else there is one of a row."""
    head = batch.to(tl.int64) * stride_sb + h.to(tl.int64) * stride_sh
    return head + rows.to(tl.int64) * stride_st


@triton.jit
def row_factor(n, unit, gamma, h, length_exponent, HAS_GAMMA: tl.constexpr):
    """C_i = unit / (gamma_h * (n_i / 2)^length_exponent), zero where nothing is seen."""
    factor = unit * tl.exp2(-length_exponent * tl.log2(tl.maximum(n, 1.0) * 0.5))
    if HAS_GAMMA:
        factor = factor / tl.load(gamma + h).to(tl.float32)
    return tl.where(n > 0, factor, 0.0)


@triton.jit
def head_threshold(
    threshold, threshold_value, inverse_scale, h, HAS_THRESHOLD_TENSOR: tl.constexpr
):
    """The threshold in the units of the scores the loop computes."""
    value = tl.load(threshold + h).to(tl.float32) if HAS_THRESHOLD_TENSOR else threshold_value
    return value * inverse_scale


@triton.jit
def raised(x, POWER: tl.constexpr):
    """x^POWER, a power of `reluformer.ops.rule.POWERS` or one less."""
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
def rectified(x, dtype: tl.constexpr, PTX: tl.constexpr):
    """max(x, 0) in `dtype`. Hopper rectifies and packs two values in one instruction, which the
    compiler does not find by itself."""
    if PTX and dtype == tl.bfloat16:
        result = tl.inline_asm_elementwise(
            "cvt.rn.relu.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], tl.bfloat16, is_pure=True, pack=2
        )
    elif PTX and dtype == tl.float16:
        result = tl.inline_asm_elementwise(
            "cvt.rn.relu.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], tl.float16, is_pure=True, pack=2
        )
    else:
        result = tl.maximum(x, 0.0).to(dtype)
    return result


@triton.jit
def halves(x, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The left and the right half of a tile [ROWS, COLS]."""
    return tl.split(tl.permute(x.reshape(ROWS, 2, COLS // 2), (0, 2, 1)))


@triton.jit
def folded(x, ROWS: tl.constexpr, COLS: tl.constexpr, TO: tl.constexpr):
    """Equal parts of a float32 tile [ROWS, COLS] added up, [ROWS, TO].

    Sums of rows that stay within a thread, unlike `tl.sum`: for totals over many tiles.
    """
    if COLS > TO:
        left, right = halves(x, ROWS, COLS)
        x = folded(left + right, ROWS, COLS // 2, TO)
    return x


@triton.jit
def folded_pairs(x, ROWS: tl.constexpr, COLS: tl.constexpr, TO: tl.constexpr):
    """`folded` for a packed bfloat16 tile: two values at once, rounded before they are float32."""
    if COLS > TO:
        left, right = halves(x, ROWS, COLS)
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
    """A packed bfloat16 tile in float32: an instruction a value, where the compiler needs more."""
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
    """log2(x), or of the least normal number where x is below it: what it multiplies is 0 there.

    The hardware's approximation where there is one.
    """
    safe = tl.maximum(x, 1.1754943508222875e-38)
    if PTX:
        result = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [safe], tl.float32, is_pure=True, pack=1
        )
    else:
        result = tl.log2(safe)
    return result


@triton.jit
def entropy_wanted(row, h, b, EVERY: tl.constexpr):
    """Whether a tile that begins at `row` lies in a block of `reluformer.ops.stats.sampled_rows`.

    Tiles have at most as many rows as a block, so one answer serves a whole tile.
    """
    return (row // BLOCK + h + b) % EVERY == 0


@triton.jit
def padded_rows(q_length):
    """Rows of each head in tables of row terms: whole tiles, so that a tile needs no mask."""
    return tl.cdiv(q_length, BLOCK) * BLOCK


@triton.jit
def dropout_keys(seed, rows, bh):
    """Random bits for each row of a head, uint32: what `dropout_factor` mixes with the columns."""
    head = rows * 0 + bh
    bits, _, _, _ = tl.philox(seed, rows, head, rows * 0, rows * 0)
    return bits.to(tl.uint32)


@triton.jit
def dropout_factor(keys, col, probability):
    """0 or 1 / (1 - probability) for every pair, a function of (seed, head, row, column) alone.

    A whole generator for every pair would cost many times the attention itself: rows get bits from
    one, and each pair a mixer of two multiplications (Wellons' lowbias32).
    """
    bits = keys ^ (col.to(tl.uint32) * 0x9E3779B1)
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    bits = bits ^ (bits >> 16)
    kept = (bits >> 8).to(tl.float32) * (1.0 / 16777216.0) >= probability
    return tl.where(kept, 1.0 / (1.0 - probability), 0.0)


@triton.jit
def key_range(
    row,
    rows_end,
    offset,
    end,
    window,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Key tiles that the query rows [row, rows_end) meet: (low, inner_low, inner_high, high).

    Tiles in [inner_low, inner_high) are seen whole by every row, those outside need a mask. Without
    `TAIL` the last, ragged tile counts as whole unless the causal edge cuts it off: its missing
    keys must be loaded as zeros, which weigh nothing.
    """
    first = row + offset
    last = rows_end - 1 + offset
    low = row * 0
    inner_low = row * 0
    high = end
    inner_high = end // KEYS * KEYS if TAIL else tl.cdiv(end, KEYS) * KEYS
    if CAUSAL:
        high = tl.minimum(high, tl.maximum(last + 1, 0))
        inner_high = tl.minimum(inner_high, tl.maximum(first + 1, 0) // KEYS * KEYS)
    if WINDOW:
        low = tl.maximum(first - window + 1, 0) // KEYS * KEYS
        inner_low = tl.cdiv(tl.maximum(last - window + 1, 0), KEYS) * KEYS
        if not CAUSAL:
            high = tl.minimum(high, tl.maximum(last + window, 0))
            inner_high = tl.minimum(inner_high, tl.maximum(first + window, 0) // KEYS * KEYS)
    return low, inner_low, tl.maximum(inner_low, inner_high), high


@triton.jit
def query_range(
    col,
    cols_end,
    offset,
    n_q,
    window,
    QUERIES: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Query tiles that the keys [col, cols_end) meet, as in `key_range`; none without keys."""
    last = cols_end - 1
    low = col * 0
    inner_low = col * 0
    high = tl.where(col < cols_end, n_q, 0)
    inner_high = high // QUERIES * QUERIES if TAIL else tl.cdiv(high, QUERIES) * QUERIES
    if CAUSAL:
        low = tl.maximum(col - offset, 0) // QUERIES * QUERIES
        inner_low = tl.cdiv(tl.maximum(last - offset, 0), QUERIES) * QUERIES
    if WINDOW:
        high = tl.minimum(high, tl.maximum(last + window - offset, 0))
        inner_high = tl.minimum(
            inner_high, tl.maximum(col + window - offset, 0) // QUERIES * QUERIES
        )
        if not CAUSAL:
            low = tl.maximum(col - window + 1 - offset, 0) // QUERIES * QUERIES
            inner_low = tl.cdiv(tl.maximum(last - window + 1 - offset, 0), QUERIES) * QUERIES
    return low, inner_low, tl.maximum(inner_low, inner_high), high
