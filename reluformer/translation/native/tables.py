"""Tables of weights in the memory of the native library."""

import ctypes
import weakref
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from reluformer.model.int8 import Int8Rows, quantise
from reluformer.model.int8_files import Parameter, dequantised
from reluformer.translation.native import layout

Precision: TypeAlias = Literal["float32", "bfloat16", "int8"]
KINDS: dict[str, int] = {"float32": 0, "bfloat16": 1, "int8": 2}
"""Precisions of weights, in the order of `Kind` in `decoder/description.h`."""


class PackedTables:
    """Tables that the native library has packed, numbered from 0.

    Args:
        library: The native library.
        precision: Precision of the packed weights.
    """

    def __init__(self, library: Any, precision: Precision) -> None:
        self.library, self.precision = library, precision
        self.handle: int = library.tables_new()
        self._check(self.handle)
        self._free = weakref.finalize(self, library.tables_free, self.handle)

    def pack(self, value: Parameter, bias: Tensor | None = None, *, is_values: bool = False) -> int:
        """Copy a table into the library.

        Args:
            value: The table, [outputs, inputs], or [slots, outputs] for the values of a memory.
            bias: Numbers that are added to each product, [outputs].
            is_values: Whether the table holds the values of a memory, which are numbered apart.

        Returns:
            The number of the table.
        """
        scales = None
        if self.precision == "int8":
            rows, scales = value if isinstance(value, Int8Rows) else quantise(value)
            scales = _numbers(scales)
        else:
            rows = dequantised(value).detach().to(getattr(torch, self.precision))
        rows = rows.cpu().contiguous()
        bias = None if bias is None else _numbers(bias)
        described = layout.Table(
            rows.data_ptr(), _address(scales), *rows.shape, KINDS[self.precision]
        )
        number: int = self.library.tables_pack(
            self.handle, ctypes.byref(described), _address(bias), is_values
        )
        self._check(number >= 0)
        return number

    def hand_over(self) -> int:
        """The handle, which the caller owns from now on."""
        self._free.detach()
        return self.handle

    def _check(self, has_memory: object) -> None:
        if not has_memory:
            raise MemoryError("not enough memory for the model")


def _numbers(values: Tensor) -> Tensor:
    return values.detach().to("cpu", torch.float32).contiguous()


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
