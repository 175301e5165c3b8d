"""Storage of keys or values that grows by appending, for KV caches."""

from torch import Tensor

_MIN_SLOTS = 16


def append_slots(buffer: Tensor | None, length: int, new: Tensor) -> Tensor:
    """Write new slots behind the used ones; the storage doubles when it is full.

    Args:
        buffer: [B, H, capacity, D], or None before the first call.
        length: Number of used slots in `buffer`.
        new: [B, H, t, D].

    Returns:
        The buffer [B, H, capacity, D], whose first `length + t` slots are in use.
    """
    end = length + new.shape[2]
    if buffer is None or buffer.shape[2] < end:
        rows, heads, _, width = new.shape
        larger = new.new_zeros(rows, heads, max(2 * length, end, _MIN_SLOTS), width)
        if buffer is not None:
            larger[:, :, :length] = buffer[:, :, :length]
        buffer = larger
    buffer[:, :, length:end] = new
    return buffer
