"""NaN and infinity in keys and values that a row cannot see do not change the row.

A hidden weight is 0, but 0 times NaN is NaN. Non-finite numbers are therefore replaced by 0 before
a product, and rows that see one of them get NaN back afterwards.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

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


def nan_in_bounds(low: Tensor | int, high: Tensor | int, values: Tensor) -> Tensor:
    """`nan_where_seen` of rows that see the keys from `low` to `high`, without a product.

    low and high are as `Visibility.bounds` gives them, values [B, H, Tk, W].
    """
    counts = functional.pad((~values.isfinite()).cumsum(dim=-2), (0, 0, 1, 0))
    before_high = _at(counts, high)
    if isinstance(low, int):
        return _nan_where(before_high > 0)
    return _nan_where(before_high > _at(counts, low))


def _at(counts: Tensor, keys: Tensor | int) -> Tensor:
    """Rows [B, H, Tq or 1, W] of counts [B, H, Tk + 1, W] at keys, broadcastable to [B, H, Tq]."""
    if isinstance(keys, int):
        return counts[..., keys : keys + 1, :]
    if keys.dim() == 1:
        return counts.index_select(-2, keys)
    size = (*counts.shape[:-2], keys.shape[-1], counts.shape[-1])
    return counts.gather(-2, keys.unsqueeze(-1).expand(size))


def nan_keys(keys: Tensor) -> Tensor:
    """NaN for keys [..., Tk, D] that hold a non-finite number, else 0: [..., 1, Tk]."""
    return _nan_where(~keys.isfinite().all(dim=-1))[..., None, :]


def _nan_where(condition: Tensor) -> Tensor:
    return torch.where(condition, torch.nan, 0.0)
