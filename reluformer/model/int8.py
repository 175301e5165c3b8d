"""Tables of weights in int8: rows of integers, each with one scale."""

from typing import NamedTuple

import torch
from torch import Tensor

from reluformer.errors import UserError

LARGEST = 127
"""Largest absolute value of a quantised weight; -128 is not used."""


class Int8Rows(NamedTuple):
    """A table [n, m] as integers and scales: row i is `scales[i] * integers[i]`."""

    integers: Tensor
    """[n, m], int8, in [-127, 127]."""
    scales: Tensor
    """[n], float32, at least 0."""

    def dequantise(self) -> Tensor:
        """The table [n, m] in float32."""
        return self.integers * self.scales.unsqueeze(1)


def quantise(table: Tensor) -> Int8Rows:
    """Round each row of a table [n, m] to multiples of its largest absolute value over 127.

    Raises:
        UserError: The table holds numbers that are not finite.
    """
    table = table.detach().float()
    if not table.isfinite().all():
        raise UserError("the model's weights are not finite and cannot be quantised")
    scales = table.abs().amax(dim=1) / LARGEST
    integers = (table / scales.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(1)).round()
    return Int8Rows(integers.clamp(-LARGEST, LARGEST).to(torch.int8), scales)
