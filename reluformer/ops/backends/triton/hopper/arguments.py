"""Arguments of the Hopper kernels besides descriptors and sizes: tuples, and one constexpr each.

Triton passes a NamedTuple as one argument and gives every field its own type. Integers in a tuple
are always specialised (`do_not_specialize` does not reach them), so integers that change with the
sequence length are arguments of their own.
"""

from typing import NamedTuple, TypeVar

import triton.language as tl
from torch import Tensor


class ForwardPointers(NamedTuple):
    """Tensors that are addressed by pointer; None where a call has none."""

    out: Tensor | None
    """The output again, for packed sequences, whose last rows TMA cannot store."""
    row_sum: Tensor | None
    """[B, H, Tq], or [N, H] of packed sequences; float32."""
    log_sum: Tensor | None
    """As row_sum."""
    gamma: Tensor | None
    """[H]."""
    threshold: Tensor | None
    """[H]."""
    lengths: Tensor | None
    """Keys that exist in each sequence of the batch, [B]."""
    work: Tensor | None
    """Work list of packed sequences."""


class BackwardPointers(NamedTuple):
    """Tensors that the backward kernels address by pointer; None where a call has none."""

    row_shift: Tensor | None
    """Sum of dS over each row, written by dQ: [B, H, Tq], float32."""
    stored: Tensor | None
    """Stored by dK/dV for dQ: signs of the weights (`portable/sign_bits.py`), int16 in dK/dV
    and int32 in dQ, or score gradients (`stored_gradients.py`), int32."""
    terms: Tensor | None
    """Terms that the gradient of row sums adds to dP: [B, H, padded Tq], float32."""
    gamma: Tensor | None
    """[H]."""
    threshold: Tensor | None
    """[H]."""
    lengths: Tensor | None
    """Keys that exist in each sequence of the batch, [B]."""


class Scalars(NamedTuple):
    """Numbers of the attention rule; float32 in the kernels."""

    scale: float
    unit: float
    """Row factor for (n / 2)^length_exponent = 1, without the gamma tensor."""
    threshold: float
    """Threshold of all heads, unless there is a tensor."""
    length_exponent: float
    epsilon: float | None
    """Added to a row sum before its row is divided by it; None without row normalisation."""


class ForwardConfig(NamedTuple):
    """Options of `hopper_forward_kernel`."""

    D: int
    """Head width of queries, keys and values."""
    GROUP: int
    """Query heads per key head."""
    CONSUMERS: int
    """Groups of four warps that compute: two or three."""
    ROWS: int
    """Query rows of each consumer."""
    KEYS: int
    """Keys of a K or V tile."""
    STAGES: int
    """Number of K buffers, and of V buffers."""
    Q_IN_REGISTERS: bool
    """Whether a consumer holds its Q tile in registers instead of in shared memory."""
    CONVERT_LATE: bool
    """Whether powers become bfloat16 weights after the product that they are computed beside: it
    takes fewer registers. Otherwise beside it, too. Not supported with `log_sum`."""
    CAUSAL: bool
    POWER: int
    """p of the weights max(score, 0)^p."""
    HAS_THRESHOLD: bool
    SCALE_SCORES: bool
    """Whether scores are multiplied by `scale` before the power; otherwise the row factor is."""
    MASK_TAIL: bool
    """Whether keys past the end need a mask: a threshold or padding can give them weight."""
    ROW_SUMS: bool
    """Whether the sums of the weights of each row are computed and written."""
    ROW_NORMALISE: bool
    """Whether output rows are divided by their sum of weights plus epsilon."""
    ENTROPY_EVERY: int
    """One block of rows in this many computes sum(w log w), if `log_sum` is given."""


class BackwardConfig(NamedTuple):
    """Options of `hopper_dkv_kernel`, `hopper_dq_kernel` and `hopper_dq_product_kernel`."""

    D: int
    """Head width of queries, keys and values."""
    GROUP: int
    """Query heads per key head."""
    CONSUMERS: int
    """Groups of four warps that compute: two, or three in dQ."""
    ROWS: int
    """Rows that each consumer owns; 64 in dK/dV and with `SIGNS`."""
    COLS: int
    """Rows of a streamed tile; 64 with `SIGNS` or `GRADIENTS`."""
    STAGES: int
    """Number of pairs of buffers for streamed tiles."""
    IN_REGISTERS: bool
    """Whether a consumer holds its resident tiles in registers instead of in shared memory."""
    CAUSAL: bool
    POWER: int
    """p of the weights max(score, 0)^p."""
    HAS_THRESHOLD: bool
    SCALE_SCORES: bool
    """Whether scores are multiplied by `scale` before the power."""
    ROW_TERMS: bool
    """Whether the gradient of row sums adds a term per row to dP."""
    GRAD_SCALED: bool
    """Whether dO and the row terms already contain the factor of their row."""
    RAGGED: bool
    """Whether the last key tile is partial."""
    SIGNS: bool
    """Whether dK/dV writes the signs of the weights, and dQ reads them instead of Q."""
    GRADIENTS: bool
    """Whether dK/dV stores its score gradients; then dQ is the product with them alone."""
    COMPACT: bool
    """Whether blocks of score gradients that no row sees have no memory (causal calls)."""
    SEPARATE_SCORES: bool
    """Whether S^T and dP^T have registers of their own in dK/dV (power above 1, no `SIGNS`)."""


Config = TypeVar("Config", ForwardConfig, BackwardConfig)


def as_constexpr(config: Config) -> Config:
    """Wrap every field in a constexpr: Gluon takes no plain integer in shapes and layouts."""
    return type(config)(*map(tl.constexpr, config))
