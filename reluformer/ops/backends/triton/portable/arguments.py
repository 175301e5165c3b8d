"""Tuples that the portable kernels take as arguments.

Triton passes a NamedTuple as one argument and gives every field its own type. Integers in a tuple
are always specialised (on 1 and on multiples of 16, `do_not_specialize` does not reach them), so
integers that change with the sequence length are separate arguments: see `LENGTH_DEPENDENT`.
"""

from typing import Any, NamedTuple

from torch import Tensor

HeadStrides = tuple[int, int, int]
"""Strides of batch, head and row of a tensor [B, H, T, D], whose last stride is 1."""

LENGTH_DEPENDENT = [
    "q_length",
    "k_length",
    "window",
    "heads",
    "mask_stride_b",
    "mask_stride_h",
    "mask_stride_q",
    "row_stride_b",
    "row_stride_h",
    "row_stride_t",
]
"""Kernel arguments whose value must not choose another compilation (`do_not_specialize`)."""


class OptionalInputs(NamedTuple):
    """Inputs of a call besides q, k and v; None where the call has none."""

    gamma: Tensor | None
    """[H], any float dtype."""
    threshold: Tensor | None
    """[H], any float dtype."""
    key_lengths: Tensor | None
    """[B], int32 or int64."""
    mask: Tensor | None
    """uint8 (bool in operators), broadcastable to [B, H, Tq, Tk]; nonzero for visible keys."""
    cu_q: Tensor | None
    """[sequences + 1], int32 or int64: first query row of each packed sequence."""
    cu_k: Tensor | None
    """[sequences + 1], int32 or int64: first key row of each packed sequence."""
    seed: Tensor | None
    """[1], int64: seed of the dropout mask."""


class Strides(NamedTuple):
    """Strides of the tensors that a kernel reads or writes in tiles; None for absent ones."""

    q: HeadStrides | None = None
    k: HeadStrides | None = None
    v: HeadStrides | None = None
    out: HeadStrides | None = None
    grad_out: HeadStrides | None = None
    dq: HeadStrides | None = None
    dk: HeadStrides | None = None
    dv: HeadStrides | None = None
    mask_key: int = 0


class Numbers(NamedTuple):
    """Floating-point arguments."""

    scale: float
    unit: float
    """Row factor C_i for (n_i / 2)^length_exponent = 1, without a gamma tensor."""
    threshold: float
    length_exponent: float
    dropout: float
    epsilon: float | None
    """Added to a row sum before the row is normalised; None without row normalisation."""


class Config(NamedTuple):
    """Compile-time switches and sizes, passed to a kernel as one `tl.constexpr`."""

    CAUSAL: bool
    WINDOW: bool
    HAS_LENGTHS: bool
    HAS_MASK: bool
    PACKED: bool
    HAS_GAMMA: bool
    ROW_NORMALISE: bool
    POWER: int = 1
    # Tile and head sizes; *_PAD is the next power of two.
    BLOCK_M: int = 0
    BLOCK_N: int = 0
    GROUP: int = 1
    """Query heads per key head."""
    D: int = 0
    DV: int = 0
    D_PAD: int = 0
    DV_PAD: int = 0
    HAS_THRESHOLD: bool = False
    THRESHOLD_TENSOR: bool = False
    SCALE_SCORES: bool = False
    """Scores are multiplied by `scale` in the loop; otherwise `unit` contains the scale."""
    DROPOUT: bool = False
    ONE_LOOP: bool = False
    """All tiles are masked in one loop, instead of separate loops for whole and masked tiles."""
    PTX: bool = False
    """Inline PTX instructions are available."""
    PRECISION: str = "ieee"
    TMA: bool = False
    """Tiles go through tensor descriptors instead of pointers."""
    STATISTICS: int = 0
    """Forward: 1 stores row sums, 2 also sums of w log w."""
    SUM_GRADS: int = 0
    """Backward: 1 for gradients of row sums (or row normalisation), 2 also of sums of w log w."""
    ENTROPY_EVERY: int = 1
    """One block of rows in this many has sums of w log w."""
    ROW_FACTORS: bool = False
    """The row factor differs between the rows that one key tile meets."""
    GRAD_SCALED: bool = False
    """`grad_out` and `terms` already contain the row factors."""
    SIGNS: bool = False
    """Signs of the weights are stored (dK, dV) or loaded (dQ)."""
    ROW_DOT: bool = False
    """dO.O of each row is stored."""
    ROW_SHIFT: bool = False
    """The sum of dS of each row is stored."""
    SCALE_GRAD: bool = False
    """`scale_rows_kernel` stores grad_out times its row factor."""
    PAGE: int = 0
    """Decoding: tokens per page, 0 for contiguous keys."""
    SKIP_VALUES: bool = False
    """Decoding: value rows whose weights are all zero are not loaded."""


# Tuples that kernels build and pass to device functions.


class Sequence(NamedTuple):
    """One sequence: batch index, first rows in packed tensors, lengths, number of valid keys."""

    batch: Any
    first_q: Any
    first_k: Any
    n_q: Any
    n_k: Any
    end: Any


class Head(NamedTuple):
    """One query head: batch, query head, key head, b * heads + h, threshold and dropout seed."""

    b: Any
    h: Any
    kv_head: Any
    bh: Any
    scaled_threshold: Any
    seed: Any


class HeadMask(NamedTuple):
    """Mask of one head: a pointer to its first element and its strides over queries and keys."""

    pointer: Any
    stride_q: Any
    stride_k: Any


class RowValues(NamedTuple):
    """Pointers to float32 values per row, [B, H, Tq] or [N, H]; None where they are not needed."""

    count: Any
    row_sum: Any
    row_dot: Any
    grad_sum: Any
    grad_log: Any
