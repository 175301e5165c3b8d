"""NaN and infinity in keys and values that a row cannot see do not change the row.

A hidden weight is 0, but 0 times NaN is NaN. Non-finite numbers are therefore replaced by 0 before
a product, and rows that see one of them get NaN back afterwards.
"""

import math

import torch
from torch import Tensor

from reluformer.ops.backends.torch_state import is_untraced


def may_be_nonfinite(*tensors: Tensor) -> bool:
    """Whether a tensor holds NaN or infinity; True where reading it would synchronise or trace."""
    if not all(tensor.device.type == "cpu" and is_untraced(tensor) for tensor in tensors):
        return True
    return has_nonfinite(*tensors)


def has_nonfinite(*tensors: Tensor) -> bool:
    """Whether a tensor on the CPU holds NaN or infinity."""
    # The sum is fast; only a sum that overflows needs the second look.
    return any(
        not math.isfinite(tensor.detach().sum()) and not bool(tensor.isfinite().all())
        for tensor in tensors
    )


def finite(tensor: Tensor) -> Tensor:
    """The tensor with 0 for NaN and infinity."""
    return tensor.masked_fill(~tensor.isfinite(), 0.0)


def nan_where_seen(visible: Tensor, values: Tensor) -> Tensor:
    """NaN for rows that see a non-finite number, else 0: [..., Tq, W] of values [..., Tk, W].

    visible is bool, broadcastable to [..., Tq, Tk] with full Tk.
    """
    if visible.dim() == 1:
        visible = visible[None]
    seen = visible.to(values.dtype) @ (~values.isfinite()).to(values.dtype)
    return _nan_where(seen > 0)


def nan_keys(keys: Tensor) -> Tensor:
    """NaN for keys [..., Tk, D] that hold a non-finite number, else 0: [..., 1, Tk]."""
    return _nan_where(~keys.isfinite().all(dim=-1))[..., None, :]


def _nan_where(condition: Tensor) -> Tensor:
    return torch.where(condition, torch.nan, 0.0)
