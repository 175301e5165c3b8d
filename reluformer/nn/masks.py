"""Masks of torch.nn as visibility and score bias.

In torch.nn a mask of booleans marks hidden keys with True, and a mask of floats is added to the
scores, with -inf or the smallest finite number for hidden keys. Fused kernels take causality and
key lengths, and no bias. Masks that express nothing else are recognised by their contents.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from reluformer.errors import UserError
from reluformer.ops.backends.torch_state import is_untraced
from reluformer.ops.visibility import Visibility


class MaskSizes(NamedTuple):
    """Sizes of an attention."""

    batch: int
    heads: int
    rows: int
    keys: int


class TorchMask(NamedTuple):
    """Visibility and bias, as arguments of `AttentionCore`."""

    mask: Tensor | None
    """Bool, broadcastable to [B, H, Tq, Tk]; True = visible."""
    causal: bool
    key_lengths: Tensor | None
    """[B] int."""
    bias: Tensor | None
    """Broadcastable to [B, H, Tq, Tk], finite."""

    def extended(self, extra: int, sizes: MaskSizes, device: torch.device) -> "TorchMask":
        """The same with `extra` further keys at the end, which every row sees."""
        visibility = Visibility(self.mask, self.causal, self.key_lengths)
        mask = visibility.table(sizes.rows, sizes.keys, device)
        if mask is not None:
            mask = functional.pad(mask, (0, extra), value=True)
        bias = self.bias
        if bias is not None:
            bias = functional.pad(bias, (0, extra))
        return TorchMask(mask, causal=False, key_lengths=None, bias=bias)


class _Contents(NamedTuple):
    """Properties of the contents of a mask [..., rows, keys]."""

    has_bias: bool
    """Whether a visible score gets a bias other than 0."""
    is_prefix: bool
    """Whether each row sees the first keys."""
    is_causal: bool
    """Whether row i sees exactly the keys j <= i, with as many rows as keys."""


_UNREAD = _Contents(has_bias=True, is_prefix=False, is_causal=False)

# Contents of masks on a GPU, with the version of the mask: the layers of a model share a mask, and
# reading it synchronises.
_READ: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def from_torch(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, is_causal: bool, sizes: MaskSizes
) -> TorchMask:
    """Visibility and bias from the masks of `torch.nn.MultiheadAttention`.

    Args:
        attn_mask: [Tq, Tk] or [B * H, Tq, Tk], bool (True = hidden) or float (added).
        key_padding_mask: [B, Tk], bool (True = hidden) or float (added).
        is_causal: Whether `attn_mask` is known to be causal.
        sizes: Sizes of the attention.
    """
    masks, biases = [], []
    key_lengths, causal = None, False
    if attn_mask is not None:
        table = _checked(attn_mask, sizes)  # [B or 1, H or 1, Tq, Tk]
        # With as many rows as keys the hint is unambiguous, and the mask is not needed.
        causal = bool(is_causal and sizes.rows == sizes.keys)
        if not causal:
            visible, bias, contents = _split(attn_mask, table)
            causal = contents.is_causal
            masks += [] if causal else [visible]
            biases += [] if bias is None else [bias]
    if key_padding_mask is not None:
        shape = (sizes.batch, sizes.keys)
        if key_padding_mask.shape != shape:
            raise UserError(
                f"key_padding_mask must have shape {shape}, got {tuple(key_padding_mask.shape)}"
            )
        _check_dtype("key_padding_mask", key_padding_mask)
        visible, bias, contents = _split(key_padding_mask, key_padding_mask[:, None, None])
        if contents.is_prefix:
            key_lengths = visible.sum(dim=-1).view(-1)
        else:
            masks.append(visible)
        biases += [] if bias is None else [bias]
    mask = masks[0] if len(masks) == 1 else masks[0] & masks[1] if masks else None
    total = biases[0] if len(biases) == 1 else biases[0] + biases[1] if biases else None
    return TorchMask(mask, causal, key_lengths, total)


def from_sdpa(attn_mask: Tensor | None, is_causal: bool, sizes: MaskSizes) -> TorchMask:
    """Visibility and bias from the masks of `torch.nn.functional.scaled_dot_product_attention`.

    Args:
        attn_mask: Broadcastable to [B, H, Tq, Tk], bool (True = visible) or float (added).
        is_causal: Whether row i sees keys j <= i only, counted from the first key.
        sizes: Sizes of the attention.
    """
    if is_causal and sizes.rows != sizes.keys:
        raise UserError(
            f"is_causal=True needs as many queries as keys, got {sizes.rows} and {sizes.keys}"
        )
    if attn_mask is None:
        return TorchMask(None, is_causal, None, None)
    if attn_mask.dtype == torch.bool:
        return TorchMask(attn_mask, is_causal, None, None)
    _check_dtype("attn_mask", attn_mask)
    table = attn_mask[(None,) * (4 - attn_mask.dim())]
    visible, bias, contents = _split(attn_mask, table)
    if contents.is_causal:
        return TorchMask(None, True, None, bias)
    return TorchMask(visible, is_causal, None, bias)


def visible_keys(key_padding_mask: Tensor) -> Tensor:
    """Bool [B, Tk]: True where a padding mask of torch hides nothing."""
    return ~_hidden(key_padding_mask)


def _hidden(mask: Tensor) -> Tensor:
    """Bool: True where a mask of torch hides a key.

    Masks of floats often have the smallest finite number in place of -inf.
    """
    return mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min / 2


def _checked(attn_mask: Tensor, sizes: MaskSizes) -> Tensor:
    """An attention mask as [B or 1, H or 1, Tq, Tk]."""
    _check_dtype("attn_mask", attn_mask)
    batch, heads, rows, keys = sizes
    if attn_mask.shape == (rows, keys):
        return attn_mask[None, None]
    if attn_mask.shape == (batch * heads, rows, keys):
        return attn_mask.view(batch, heads, rows, keys)
    raise UserError(
        f"attn_mask must have shape {(rows, keys)} or {(batch * heads, rows, keys)}, "
        f"got {tuple(attn_mask.shape)}"
    )


def _check_dtype(name: str, mask: Tensor) -> None:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise UserError(f"{name} must be bool (True = hidden) or floating-point, got {mask.dtype}")


def _split(mask: Tensor, table: Tensor) -> tuple[Tensor, Tensor | None, _Contents]:
    """Visible keys, bias and contents of a mask; `table` is a view of it that broadcasts."""
    contents = _contents(mask, table)
    hidden = _hidden(table)
    return ~hidden, table.masked_fill(hidden, 0.0) if contents.has_bias else None, contents


def _contents(mask: Tensor, table: Tensor) -> _Contents:
    """Contents of a mask; `_UNREAD` where they cannot be read."""
    is_bool = mask.dtype == torch.bool
    unread = _UNREAD._replace(has_bias=not is_bool)
    if mask.requires_grad or not is_untraced(mask) or mask.device.type == "meta":
        return unread
    if not mask.is_cuda:
        return _read(table)
    if torch.cuda.is_current_stream_capturing():
        return unread
    return _remembered(mask, table)


def _remembered(mask: Tensor, table: Tensor) -> _Contents:
    """Contents of a mask, read once for each version of it."""
    if mask.is_inference():
        # Tensors of inference mode have no version.
        return _read(table)
    known = _READ.get(mask, None)  # type: ignore[no-untyped-call]
    if known is None or known[0] != mask._version:
        known = _READ[mask] = (mask._version, _read(table))
    contents: _Contents = known[1]
    return contents


def _read(table: Tensor) -> _Contents:
    """Contents of a mask [..., rows, keys], read at once."""
    rows, keys = table.shape[-2:]
    visible = ~_hidden(table)
    key = torch.arange(keys, device=table.device)
    # On a CPU, sums in int64 take far longer.
    count = visible.sum(dim=-1, keepdim=True, dtype=torch.int32)
    is_prefix = (visible == (key < count)).all()
    square = rows == keys and rows > 1 and table.shape[:2] == (1, 1)
    is_causal = (visible == (key <= key[:, None])).all() if square else is_prefix & False
    has_bias = is_prefix & False
    if table.dtype != torch.bool:
        has_bias = (visible & (table != 0)).any()
    return _Contents(*torch.stack([has_bias, is_prefix, is_causal]).tolist())
