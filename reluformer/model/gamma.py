"""Gamma, the learned or calibrated temperature of ReLU attention."""

import math

import torch
from torch import Tensor, nn


class Gamma(nn.Module):
    """gamma = exp(log_gamma), one value or one per head; a parameter if learned, else a buffer.

    Row sums are proportional to 1 / gamma, which is what calibration uses. A `shared` gamma serves
    several attentions and is calibrated to their geometric mean.
    """

    log_gamma: Tensor

    def __init__(
        self, init: float, *, heads: int | None = None, learned: bool, shared: bool = False
    ) -> None:
        super().__init__()
        # One value is stored as [1], for sharded training has no place for single numbers.
        start = torch.full((heads or 1,), math.log(init))
        if learned:
            self.log_gamma = nn.Parameter(start)
        else:
            self.register_buffer("log_gamma", start)
        self.per_head, self.shared = heads is not None, shared
        self._corrections: list[Tensor] = []

    def forward(self) -> Tensor:
        """gamma, of shape [] or [H]."""
        gamma = self.log_gamma.exp()
        return gamma if self.per_head else gamma.squeeze(0)

    @torch.no_grad()
    def observe(self, row_sums: Tensor, valid: Tensor, target: float) -> None:
        """Correct gamma so that `row_sums` [B, H, T] would average `target` over `valid` rows."""
        mask = valid.expand_as(row_sums)
        over = (0, 2) if self.per_head else (0, 1, 2)
        mean = (row_sums * mask).sum(dim=over) / mask.sum(dim=over).clamp_min(1)
        # A head without any weight tells nothing about its scale: it keeps its gamma.
        correction = torch.where(mean > 0, mean / target, 1.0).log()
        if self.shared:
            self._corrections.append(correction)
        else:
            self.log_gamma.add_(correction.to(self.log_gamma.dtype))

    @torch.no_grad()
    def settle(self) -> None:
        """Apply what a shared gamma has observed."""
        if self._corrections:
            self.log_gamma.add_(torch.stack(self._corrections).mean(0).to(self.log_gamma.dtype))
            self._corrections.clear()
