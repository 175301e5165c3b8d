"""Reshapes between features, heads, beams and query rows."""

import torch
from torch import Tensor


def split_heads(features: Tensor, heads: int) -> Tensor:
    """[B, T, heads * D] as [B, heads, T, D]."""
    batch, length, width = features.shape
    return features.view(batch, length, heads, width // heads).transpose(1, 2)


def merge_heads(heads: Tensor) -> Tensor:
    """[B, heads, T, D] as [B, T, heads * D]."""
    return heads.transpose(1, 2).flatten(2)


def beams_of(rows: Tensor, sentences: Tensor) -> int:
    """Number of rows of the first tensor for each row of the second; 1 for an empty batch."""
    return rows.shape[0] // sentences.shape[0] if sentences.shape[0] else 1


def beams_to_rows(q: Tensor, beams: int) -> Tensor:
    """[B * beams, H, T, D] as [B, H, beams * T, D]: the beams of a sentence share its context."""
    if beams == 1:
        return q
    rows, heads, length, width = q.shape
    beams_first = q.view(rows // beams, beams, heads, length, width)
    return beams_first.transpose(1, 2).reshape(rows // beams, heads, beams * length, width)


def rows_to_beams(output: Tensor, beams: int) -> Tensor:
    """[B, H, beams * T, D] as [B * beams, H, T, D]."""
    if beams == 1:
        return output
    batch, heads, rows, width = output.shape
    by_beam = output.reshape(batch, heads, beams, rows // beams, width)
    return by_beam.transpose(1, 2).reshape(batch * beams, heads, rows // beams, width)


def valid_rows(lengths: Tensor | None, rows: int, device: torch.device) -> Tensor:
    """Bool [B or 1, 1, rows]: True where a query is a token and not padding."""
    if lengths is None:
        return torch.ones(1, 1, rows, dtype=torch.bool, device=device)
    return torch.arange(rows, device=device) < lengths.to(device).view(-1, 1, 1)


def sample_indices(rows: int, count: int, device: torch.device) -> Tensor:
    """Indices [count] of random rows without repetition, or of all rows if there are fewer."""
    # A CUDA graph cannot capture `randperm`, but it can capture sorting random numbers.
    return torch.rand(rows, device=device).argsort()[:count]
