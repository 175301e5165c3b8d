"""Positions of tokens: sinusoids added to embeddings, or rotations of queries and keys."""

import math
from typing import TypeAlias

import torch
from torch import Tensor

Start: TypeAlias = int | Tensor
"""Position of the first of T consecutive tokens, or positions of all tokens, [T] or [B, T]."""


def sinusoids(length: int, width: int, start: Start, like: Tensor) -> Tensor:
    """Sines and cosines of the tokens' positions (Vaswani et al. 2017), [..., length, width]."""
    half = (width + 1) // 2
    rates = torch.exp(
        torch.arange(half, device=like.device, dtype=torch.float32)
        * (-math.log(10000.0) / max(half - 1, 1))
    )
    angles = _positions(start, length, like.device).unsqueeze(-1) * rates
    return torch.cat([angles.sin(), angles.cos()], dim=-1)[..., :width].to(like.dtype)


def rotate(heads: Tensor, start: Start) -> Tensor:
    """Rotate pairs of features of [B, H, T, D] by their tokens' positions (Su et al. 2021).

    The product of two rotated vectors depends on the distance of their positions only.
    """
    length, width = heads.shape[-2:]
    rates = 10000.0 ** (
        -torch.arange(0, width, 2, device=heads.device, dtype=torch.float32) / width
    )
    angles = _positions(start, length, heads.device).unsqueeze(-1) * rates
    if angles.dim() == 3:
        angles = angles.unsqueeze(1)  # [B, 1, T, D / 2]
    sine, cosine = angles.sin().to(heads.dtype), angles.cos().to(heads.dtype)
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


def _positions(start: Start, length: int, device: torch.device) -> Tensor:
    """Positions [T] or [B, T], in float32."""
    if isinstance(start, Tensor):
        return start.to(device, torch.float32)
    return torch.arange(start, start + length, device=device, dtype=torch.float32)
