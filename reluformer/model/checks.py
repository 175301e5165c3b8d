"""Checks of the token ids and lengths that a model receives."""

import torch
from torch import Tensor, nn

from reluformer.errors import UserError
from reluformer.ops.backends.torch_state import is_untraced
from reluformer.ops.checks import INTS
from reluformer.ops.gate import check_storage


def check_tokens(name: str, tokens: object, embedding: nn.Embedding) -> None:
    """Refuse tokens that are not ids [B, T] of the embedding's vocabulary, on its device.

    The ids themselves are read on a CPU only, where this does not synchronise.
    """
    if not isinstance(tokens, Tensor):
        kind = type(tokens).__name__
        raise UserError(f"{name} must be a tensor of token ids [B, T], got {kind}")
    check_storage([("the model", embedding.weight), (name, tokens)])
    if tokens.dim() != 2 or tokens.dtype not in (torch.int32, torch.int64):
        raise UserError(
            f"{name} must be token ids [B, T] in int64 or int32, "
            f"got {tokens.dtype} of shape {list(tokens.shape)}"
        )
    if tokens.device.type != "cpu" or not tokens.numel() or not is_untraced(tokens):
        return
    least, most = (int(end) for end in tokens.aminmax())
    if least < 0 or most >= embedding.num_embeddings:
        wrong = least if least < 0 else most
        raise UserError(
            f"{name} must hold ids from 0 to {embedding.num_embeddings - 1}, got {wrong}"
        )


def check_lengths(name: str, lengths: object, tokens: Tensor) -> None:
    """Refuse lengths that are not integers [B] for tokens [B, T]; None passes.

    They may also be on the CPU.
    """
    if lengths is None:
        return
    batch = tokens.shape[0]
    if not isinstance(lengths, Tensor):
        kind = type(lengths).__name__
        raise UserError(f"{name} must be an integer tensor of shape [{batch}], got {kind}")
    is_on_cpu = lengths.device.type == "cpu"
    check_storage([(name, lengths)] if is_on_cpu else [("the batch", tokens), (name, lengths)])
    if lengths.shape != (batch,) or lengths.dtype not in INTS:
        raise UserError(
            f"{name} must be an integer tensor of shape [{batch}], "
            f"got {lengths.dtype} of shape {list(lengths.shape)}"
        )


def check_batch(source: Tensor, target: Tensor) -> None:
    """Refuse a target [B, T] with another batch size than the source [B, S]."""
    if target.shape[0] != source.shape[0]:
        raise UserError(
            f"target must have the batch size of source, {source.shape[0]}, got {target.shape[0]}"
        )


def check_beams(rows: int, sentences: int) -> None:
    """Refuse rows that are not the same number of beams for each sentence."""
    if (rows == 0 or rows % sentences) if sentences else rows:
        raise UserError(
            f"tokens must have the same number of rows for each of {sentences} sentences, "
            f"got {rows} rows"
        )
