"""One call as the kernels see it, and what of it is fixed at compile time."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from reluformer.ops.backends.triton import tuning


class Problem(NamedTuple):
    """One call: dense tensors [B, H, T, D] or, with `cu_q`, packed ones seen as [1, H, N, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    gamma: Tensor | None
    threshold: Tensor | None
    key_lengths: Tensor | None
    mask: Tensor | None
    cu_q: Tensor | None
    cu_k: Tensor | None
    seed: Tensor | None
    scale: float
    gamma_value: float
    threshold_value: float
    length_exponent: float
    power: int
    causal: bool
    window: int
    dropout_p: float
    max_q: int
    max_k: int
    entropy_every: int = 1
    row_normalise: float = 0.0
    """What is added to the sum of a row before its output is divided by it; 0: it is not."""

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The first ten fields."""
        return self[:10]

    @property
    def optional(self) -> tuple[Tensor | None, ...]:
        """gamma, threshold, lengths, mask, cu_q, cu_k, seed as the kernels take them."""
        mask = self.mask
        if mask is None:
            return self[3:10]
        return (*self[3:6], mask.view(torch.uint8), *self[7:10])

    @property
    def packed(self) -> bool:
        """Whether sequences lie one after the other, without padding."""
        return self.cu_q is not None

    @property
    def sequences(self) -> int:
        """How many sequences there are, packed or padded."""
        return self.q.shape[0] if self.cu_q is None else self.cu_q.shape[0] - 1

    @property
    def width(self) -> int:
        """Of a tile: the larger of two, padded."""
        return max(pad(self.q.shape[-1]), pad(self.v.shape[-1]))

    @property
    def group(self) -> int:
        """How many query heads share a key head."""
        return self.q.shape[1] // self.k.shape[1]

    def at(self, batches: slice, heads: slice, key_heads: slice) -> "Problem":
        """The same call on some batches and heads; there is no mask, packing or dropout."""
        gamma, threshold, lengths = self.gamma, self.threshold, self.key_lengths
        return self._replace(
            q=self.q[batches, heads],
            k=self.k[batches, key_heads],
            v=self.v[batches, key_heads],
            gamma=None if gamma is None else gamma[heads],
            threshold=None if threshold is None else threshold[heads],
            key_lengths=None if lengths is None else lengths[batches],
        )

    @property
    def prescaled_scores(self) -> bool:
        """float16 cannot hold unscaled products, and their third and fourth powers could leave the
        range of any type; other calls need no multiplication there."""
        return self.q.dtype == torch.float16 or self.power > 2

    @property
    def unit(self) -> float:
        """What C_i is for (n_i / 2)^length_exponent = 1 and no gamma tensor."""
        scale = 1.0 if self.prescaled_scores else self.scale**self.power
        return scale / self.gamma_value

    @property
    def divided(self) -> bool:
        """Whether output rows are divided by their sums of weights."""
        return self.row_normalise > 0

    @property
    def epsilon(self) -> float | None:
        """The kernels' argument for `row_normalise`; None leaves it out of their code."""
        return self.row_normalise if self.divided else None

    @property
    def per_row(self) -> bool:
        """Whether what multiplies a row differs between the rows that one key meets."""
        return self.divided or self._varies

    @property
    def _varies(self) -> bool:
        """Whether C_i does."""
        varies = self.causal or self.window > 0 or self.mask is not None
        return varies or (self.group > 1 and self.gamma is not None)

    def tile(self, kernel: tuning.Kernel, *, signs: bool = False) -> tuning.Tile:
        """The tile of the table for this call; with signs of weights for or from it."""
        # A tile of keys meets their lengths once, before its loop.
        padded = self.key_lengths is not None and kernel != "keys"
        edged = self._varies or padded or self.dropout_p > 0
        return tuning.pick(kernel, self.width, edged, self.max_k, self.q.element_size(), signs)

    def mask_steps(self) -> tuple[int, ...]:
        """Strides of the mask over [B, H, Tq, Tk], zero where it is broadcast."""
        if self.mask is None:
            return (0, 0, 0, 0)
        shape = (self.sequences, self.q.shape[1], self.max_q, self.max_k)
        return self.mask.expand(shape).stride()

    def row_steps(self) -> tuple[int, int, int]:
        """Strides of row values over (batch, head, row): [B, H, Tq] dense, [N, H] packed."""
        heads, rows = self.q.shape[1], self.q.shape[2]
        return (0, 1, heads) if self.packed else (heads * rows, rows, 1)

    def numbers(self) -> tuple[float | None, ...]:
        """Scalar arguments in the order of the kernels."""
        return (
            self.q.shape[1],
            self.max_q,
            self.max_k,
            self.window,
            self.scale,
            self.unit,
            self.threshold_value,
            self.length_exponent,
            self.dropout_p,
            self.epsilon,
        )

    def row_numbers(self) -> tuple[float | None, ...]:
        """Scalar arguments of the passes over rows, which meet no keys."""
        numbers = (self.window, self.unit, self.length_exponent, self.epsilon)
        return (*self.row_steps(), self.q.shape[1], self.max_q, self.max_k, *numbers)

    def row_switches(self) -> dict[str, Any]:
        """Compile-time arguments that those passes share."""
        return {
            "CAUSAL": self.causal,
            "WINDOW": self.window > 0,
            "HAS_LENGTHS": self.key_lengths is not None,
            "HAS_MASK": self.mask is not None,
            "VARLEN": self.packed,
            "HAS_GAMMA": self.gamma is not None,
            "DIVIDE": self.divided,
            "num_warps": 4,
        }

    def switches(self, tile: tuning.Tile) -> dict[str, Any]:
        """Compile-time arguments that all kernels with a tile share."""
        q, v = self.q, self.v
        return {
            **self.row_switches(),
            "GROUP": self.group,
            "QUERIES": tile.queries,
            "KEYS": tile.keys,
            "D": q.shape[-1],
            "DV": v.shape[-1],
            "D_PAD": pad(q.shape[-1]),
            "DV_PAD": pad(v.shape[-1]),
            "POWER": self.power,
            "HAS_THRESHOLD": self.threshold is not None or self.threshold_value != 0.0,
            "THRESHOLD_TENSOR": self.threshold is not None,
            "PRESCALE": self.prescaled_scores,
            "DROPOUT": self.dropout_p > 0.0,
            "ONE_LOOP": tile.one_loop,
            "PTX": q.is_cuda and torch.version.hip is None and not interpreting(),
            "PRECISION": _precision(q.dtype),
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }


def interpreting() -> bool:
    """Whether Triton interprets the kernels instead of compiling them."""
    return bool(triton.knobs.runtime.interpret)


def pad(width: int) -> int:
    """The next power of two."""
    return int(triton.next_power_of_2(width))


def _precision(dtype: torch.dtype) -> str:
    # float32 follows torch's own switch; three tf32 products keep float32 accuracy.
    if dtype != torch.float32 or interpreting():
        return "ieee"
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"
