"""Where a token stands: sinusoids added to the embedding, or rotations of queries and keys."""

import math

import torch
from torch import Tensor


def sinusoids(length: int, width: int, start: int, like: Tensor) -> Tensor:
    """[length, width] sines and cosines of positions start, start + 1, ... (Vaswani 2017)."""
    half = (width + 1) // 2
    rates = torch.exp(
        torch.arange(half, device=like.device, dtype=torch.float32)
        * (-math.log(10000.0) / max(half - 1, 1))
    )
    position = torch.arange(start, start + length, device=like.device, dtype=torch.float32)
    angles = position.unsqueeze(-1) * rates
    return torch.cat([angles.sin(), angles.cos()], dim=-1)[:, :width].to(like.dtype)


def rotate(heads: Tensor, start: int) -> Tensor:
    """Rotate pairs of features of [B, H, T, D] by their position start, start + 1, ... (Su 2021).

    The product of two rotated vectors depends on the distance of their positions alone.
    """
    length, width = heads.shape[-2:]
    rates = 10000.0 ** (
        -torch.arange(0, width, 2, device=heads.device, dtype=torch.float32) / width
    )
    position = torch.arange(start, start + length, device=heads.device, dtype=torch.float32)
    angles = position.unsqueeze(-1) * rates
    sine, cosine = angles.sin().to(heads.dtype), angles.cos().to(heads.dtype)
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
