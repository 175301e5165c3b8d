"""Which keys each query row can see, and how many.

Every length (in the ReLU scale, the sigmoid bias, log n temperatures) is counted on the mask, so
that padding, caches and other batch elements do not change a result.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Visibility:
    """The rules that hide keys: a key is visible when all of them allow it.

    mask         bool, broadcastable to [B, H, Tq, Tk]; True = visible
    causal       row i sees keys j <= i + Tk - Tq: aligned to the end, as cached decoding needs
    key_lengths  [B] int; batch element b sees keys j < key_lengths[b]
    window       row i sees keys with |i + Tk - Tq - j| < window
    """

    mask: Tensor | None = None
    causal: bool = False
    key_lengths: Tensor | None = None
    window: int | None = None

    @property
    def only_causal(self) -> bool:
        """Whether causality alone hides keys."""
        others = (self.mask, self.key_lengths, self.window)
        return self.causal and all(rule is None for rule in others)

    @property
    def hides_keys(self) -> bool:
        """Whether any rule is set."""
        others = (self.mask, self.key_lengths, self.window)
        return self.causal or any(rule is not None for rule in others)

    def table(self, rows: int, keys: int, device: torch.device) -> Tensor | None:
        """Bool, broadcastable to [B, H, Tq, Tk] with full Tk; None when every key is visible."""
        allowed: list[Tensor] = []
        if self.causal or self.window is not None:
            key = torch.arange(keys, device=device)
            row = torch.arange(keys - rows, keys, device=device).unsqueeze(-1)
            if self.causal:
                allowed.append(key <= row)
            if self.window is not None:
                allowed.append((row - key).abs() < self.window)
        if self.key_lengths is not None:
            key = torch.arange(keys, device=device)
            allowed.append(key < self.key_lengths.to(device).view(-1, 1, 1, 1))
        if self.mask is not None:
            allowed.append(self.mask)
        if not allowed:
            return None
        visible = allowed[0]
        for rule in allowed[1:]:
            visible = visible & rule
        return visible.expand(*visible.shape[:-1], keys)

    def count(self, rows: int, keys: int, device: torch.device) -> Tensor | int:
        """n, the number of keys each row sees, broadcastable to [B, H, Tq].

        Only a mask has to be counted; otherwise n follows from the positions of the rows.
        """
        if self.mask is not None:
            table = self.table(rows, keys, device)
            assert table is not None
            # On a CPU, sums in int64 take far longer.
            return table.sum(dim=-1, dtype=torch.int32).long()
        end: Tensor | int = keys
        if self.key_lengths is not None:
            end = self.key_lengths.to(device, torch.int64).clamp(0, keys).view(-1, 1, 1)
        elif rows == 1:
            # A single row is the last position: it sees all keys.
            return keys if self.window is None else min(keys, self.window)
        if not self.causal and self.window is None:
            return end
        # Not from `bounds`: a first call nests few frames above its kernel.
        position = torch.arange(keys - rows, keys, device=device)
        high = position + 1 if self.causal else position + (self.window or 0)
        high = torch.minimum(high, end) if isinstance(end, Tensor) else high.clamp(max=end)
        if self.window is not None:
            high = high - (position - self.window + 1).clamp(min=0)
        return high.clamp(min=0)

    def bounds(
        self, rows: int, keys: int, device: torch.device
    ) -> tuple[Tensor | int, Tensor | int]:
        """First visible key of each row, and the key after the last; a mask is not considered.

        Both are broadcastable to [B, H, Tq] and between 0 and Tk. A row for which the second is not
        above the first sees no key.
        """
        end: Tensor | int = keys
        if self.key_lengths is not None:
            end = self.key_lengths.to(device, torch.int64).clamp(0, keys).view(-1, 1, 1)
        if not self.causal and self.window is None:
            return 0, end
        position = torch.arange(keys - rows, keys, device=device)
        high = position + 1 if self.causal else position + (self.window or 0)
        high = torch.minimum(high, end) if isinstance(end, Tensor) else high.clamp(max=end)
        low = 0 if self.window is None else (position - self.window + 1).clamp(min=0)
        return low, high.clamp(min=0)


def count_visible(visible: Tensor | None, keys: int, like: Tensor) -> Tensor:
    """n, the number of keys each row sees, as `like`'s dtype: [..., Tq, 1] (or [1, 1] if all)."""
    if visible is None:
        return torch.full((1, 1), keys, dtype=like.dtype, device=like.device)
    return visible.sum(dim=-1, keepdim=True, dtype=like.dtype)
