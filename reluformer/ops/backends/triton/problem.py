"""One call as the kernels receive it: tensors in their layout, and all other values as numbers.

This module does not import Triton.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from reluformer.ops.backends.triton.portable.arguments import HeadStrides, OptionalInputs

NO_INPUTS = OptionalInputs(None, None, None, None, None, None, None)


class Settings(NamedTuple):
    """Values of a call that are not tensors; hashable, so that they can be part of a key."""

    scale: float
    max_q: int
    """Queries of the longest sequence."""
    max_k: int
    """Keys of the longest sequence."""
    gamma_value: float = 1.0
    """1 where gamma is a tensor."""
    threshold_value: float = 0.0
    """0 where the threshold is a tensor."""
    length_exponent: float = 0.5
    power: int = 1
    causal: bool = False
    window: int = 0
    """Keys that a query sees on each side, itself included; 0 without a window."""
    dropout_p: float = 0.0
    entropy_every: int = 1
    row_normalise: float = 0.0
    """Added to a row sum before the row is divided by it; 0 without row normalisation."""


class Problem(NamedTuple):
    """One call on dense tensors [B, H, T, D], or on packed ones seen as [1, H, N, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    optional: OptionalInputs
    settings: Settings

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All tensors, in the order q, k, v and then `OptionalInputs`."""
        return (self.q, self.k, self.v, *self.optional)

    @property
    def is_packed(self) -> bool:
        """Whether sequences are stored one after the other, without padding."""
        return self.optional.cu_q is not None

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        cu_q = self.optional.cu_q
        return self.q.shape[0] if cu_q is None else cu_q.shape[0] - 1

    @property
    def width(self) -> int:
        """Larger of the QK and V head widths, each padded to a power of two."""
        return max(pad(self.q.shape[-1]), pad(self.v.shape[-1]))

    @property
    def group(self) -> int:
        """Number of query heads per key head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def scales_scores(self) -> bool:
        """Whether the loop multiplies scores by `scale`; otherwise `unit` contains the scale.

        float16 overflows with unscaled products, and high powers of them leave any range.
        """
        return self.q.dtype == torch.float16 or self.settings.power > 2

    @property
    def unit(self) -> float:
        """Row factor C_i for (n_i / 2)^length_exponent = 1, without a gamma tensor."""
        scale = 1.0 if self.scales_scores else self.settings.scale**self.settings.power
        return scale / self.settings.gamma_value

    @property
    def is_row_normalised(self) -> bool:
        """Whether output rows are divided by their sums of weights."""
        return self.settings.row_normalise > 0

    @property
    def epsilon(self) -> float | None:
        """`row_normalise` as the kernels take it; None removes it from their code."""
        return self.settings.row_normalise if self.is_row_normalised else None

    @property
    def rows_vary(self) -> bool:
        """Whether C_i differs between the rows that one key tile meets."""
        settings, optional = self.settings, self.optional
        varies = settings.causal or settings.window > 0 or optional.mask is not None
        return varies or (self.group > 1 and optional.gamma is not None)

    @property
    def has_row_factors(self) -> bool:
        """Whether the factor of a row, C_i or C_i / T_i, differs between rows."""
        return self.is_row_normalised or self.rows_vary

    def select(self, batches: slice, heads: slice, key_heads: slice) -> "Problem":
        """The call on some batches and heads; without mask, packing and dropout."""
        gamma, threshold, lengths = self.optional[:3]
        return self._replace(
            q=self.q[batches, heads],
            k=self.k[batches, key_heads],
            v=self.v[batches, key_heads],
            optional=self.optional._replace(
                gamma=None if gamma is None else gamma[heads],
                threshold=None if threshold is None else threshold[heads],
                key_lengths=None if lengths is None else lengths[batches],
            ),
        )

    def mask_strides(self) -> tuple[int, int, int, int]:
        """Strides of the mask over [B, H, Tq, Tk], zero where it is broadcast."""
        if self.optional.mask is None:
            return (0, 0, 0, 0)
        shape = (self.sequences, self.q.shape[1], self.settings.max_q, self.settings.max_k)
        b, h, q, k = self.optional.mask.expand(shape).stride()
        return b, h, q, k

    def row_strides(self) -> tuple[int, int, int]:
        """Strides of row values over (batch, head, row): [B, H, Tq] dense, [N, H] packed."""
        heads, rows = self.q.shape[1], self.q.shape[2]
        return (0, 1, heads) if self.is_packed else (heads * rows, rows, 1)


def pad(width: int) -> int:
    """The next power of two, `width` itself if it is one."""
    return 1 << (width - 1).bit_length()


def cdiv(number: int, size: int) -> int:
    """number / size, rounded up. `triton.cdiv` takes microseconds on the host."""
    return -(-number // size)


def head_strides(tensor: Tensor) -> HeadStrides:
    """Strides of batch, head and row of [B, H, T, D]."""
    b, h, t, _ = tensor.stride()
    return b, h, t
