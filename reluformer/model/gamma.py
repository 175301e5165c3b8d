"""Gamma, the learned or calibrated divisor of the weights of ReLU attention."""

import math

import torch
from torch import Tensor, nn


class Gamma(nn.Module):
    """gamma = exp(log_gamma), one value or one per head; a parameter if learned, else a buffer.

    Row sums are proportional to 1 / gamma, which calibration uses.

    Args:
        init: Initial value.
        heads: Number of heads for one value per head; None for a single value.
        learned: Whether gamma is a parameter.
        shared: Whether several attentions share this gamma; it is then calibrated to the geometric
            mean of their values.
    """

    log_gamma: Tensor

    def __init__(
        self, init: float, *, heads: int | None = None, learned: bool, shared: bool = False
    ) -> None:
        super().__init__()
        # A single value is stored as [1], because FSDP cannot shard scalars.
        initial = torch.full((heads or 1,), math.log(init))
        if learned:
            self.log_gamma = nn.Parameter(initial)
        else:
            self.register_buffer("log_gamma", initial)
        self.per_head, self.shared = heads is not None, shared
        self._corrections: list[Tensor] = []

    def forward(self) -> Tensor:
        """Gamma, [] or [H]."""
        gamma = self.log_gamma.exp()
        return gamma if self.per_head else gamma.squeeze(0)

    @torch.no_grad()
    def observe(self, row_sums: Tensor, valid: Tensor, target: float) -> None:
        """Correct gamma so that row sums average `target`.

        Args:
            row_sums: Row sums with the present gamma, [B, H, T].
            valid: Rows that count, bool, broadcastable to [B, H, T].
            target: Mean row sum to reach.
        """
        mask = valid.expand_as(row_sums)
        dims = (0, 2) if self.per_head else (0, 1, 2)
        mean = (row_sums * mask).sum(dim=dims) / mask.sum(dim=dims).clamp_min(1)
        # A head without weights has no scale to correct.
        correction = torch.where(mean > 0, mean / target, 1.0).log()
        if self.shared:
            self._corrections.append(correction)
        else:
            self.log_gamma.add_(correction.to(self.log_gamma.dtype))

    @torch.no_grad()
    def settle(self) -> None:
        """Apply the mean of the corrections of a shared gamma."""
        if self._corrections:
            self.log_gamma.add_(torch.stack(self._corrections).mean(0).to(self.log_gamma.dtype))
            self._corrections.clear()
