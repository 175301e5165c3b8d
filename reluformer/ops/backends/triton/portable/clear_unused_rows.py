"""Kernel that clears the rows of a packed tensor that belong to no sequence."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["sequences", "tokens", "heads", "stride_h", "stride_t"])
def clear_unused_rows_kernel(
    out,
    cu,
    sequences,
    tokens,
    heads,
    stride_h,
    stride_t,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Store zeros in the rows of [H, N, WIDTH] before cu[0] and from cu[sequences] on.

    A program owns ROWS rows and loops over the heads; most programs have nothing to clear.
    """
    # Rows [first, last) belong to sequences.
    first = tl.load(cu)
    last = tl.load(cu + sequences)
    row = tl.program_id(0) * ROWS
    if row < first or row + ROWS > last:
        rows = row + tl.arange(0, ROWS)  # [ROWS]
        cols = tl.arange(0, PADDED)  # [PADDED]
        unused = ((rows < first) | (rows >= last)) & (rows < tokens)
        places = out + rows.to(tl.int64)[:, None] * stride_t + cols[None, :]  # [ROWS, PADDED]
        mask = unused[:, None] & (cols < WIDTH)[None, :]
        for _ in range(heads):
            tl.store(places, 0.0, mask=mask)
            places += stride_h
