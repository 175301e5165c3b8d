"""Results of packed calls: the kernels fill the sequences' rows, the rows of no sequence are zero.

To set all of a result to zero first would cost a twentieth of an attention of 4,096 tokens.
"""

import triton
import triton.language as tl
from torch import Tensor

from reluformer.ops.backends.triton.launch import LAUNCHES, Prepared, remember, signature
from reluformer.ops.backends.triton.layout import empty_heads
from reluformer.ops.backends.triton.plan import pad

_ROWS = 64


@triton.jit(do_not_specialize=["sequences", "tokens", "heads", "stride_h", "stride_t"])
def clear_outside_kernel(
    made,
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
    """Zeros in the rows of [H, N, WIDTH] before cu[0] and from cu[sequences] on."""
    first = tl.load(cu)
    last = tl.load(cu + sequences)
    row = tl.program_id(0) * ROWS
    if row < first or row + ROWS > last:
        rows = row + tl.arange(0, ROWS)
        cols = tl.arange(0, PADDED)
        outside = ((rows < first) | (rows >= last)) & (rows < tokens)
        places = made + rows.to(tl.int64)[:, None] * stride_t + cols[None, :]
        inside = outside[:, None] & (cols < WIDTH)[None, :]
        for _ in range(heads):
            tl.store(places, 0.0, mask=inside)
            places += stride_h


def packed_heads(like: Tensor, width: int, cu: Tensor | None) -> Tensor:
    """`empty_heads`, but for packed sequences [1, H, N, width] with zeros in the rows of none."""
    made = empty_heads(like, width)
    if cu is None or made.numel() == 0:
        return made
    key = signature(("clear",), (made, cu))
    launch = LAUNCHES.get(key)
    if launch is None:
        switches = {"ROWS": _ROWS, "WIDTH": width, "PADDED": pad(width), "num_warps": 4}
        launch = Prepared(clear_outside_kernel, switches)
        remember(key, launch)
    heads, tokens = made.shape[1:3]
    numbers = [cu.shape[0] - 1, tokens, heads, *made.stride()[1:3]]
    launch(triton.cdiv(tokens, _ROWS), [made, cu, *numbers])
    return made
