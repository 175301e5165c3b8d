"""Output transforms [B, H, Tq, Dv] -> [B, H, Tq, Dv] of some attentions: norms and gates."""

from torch import Tensor

EPSILON = 1e-6


def over_heads(output: Tensor, *, gain: Tensor | None = None, gate: Tensor | None = None) -> Tensor:
    """RMSNorm over heads and width together, then times sigmoid(gate * output) (ReLA).

    `gain` and `gate` are [H * Dv], the concatenated heads; None leaves that factor out.
    """
    normalised = output / (output.square().mean(dim=(1, 3), keepdim=True) + EPSILON).sqrt()
    if gain is not None:
        normalised = normalised * _by_head(gain, output)
    if gate is not None:
        normalised = normalised * (_by_head(gate, output) * output).sigmoid()
    return normalised


def in_head(output: Tensor, *, gain: Tensor | None = None) -> Tensor:
    """RMSNorm over the width of each head, times `gain` [H * Dv]."""
    normalised = output / (output.square().mean(dim=-1, keepdim=True) + EPSILON).sqrt()
    return normalised if gain is None else normalised * _by_head(gain, output)


def differential(output: Tensor, *, gain: Tensor | None = None, lam_init: float = 0.2) -> Tensor:
    """RMSNorm over the width of each head, times 1 - lambda_init (Differential Transformer)."""
    return in_head(output, gain=gain) * (1 - lam_init)


def gated(output: Tensor, *, gate: Tensor | None = None) -> Tensor:
    """Output times sigmoid(gate); `gate` is broadcastable to [B, H, Tq, Dv], None means no gate."""
    return output if gate is None else output * gate.sigmoid()


def _by_head(vector: Tensor, output: Tensor) -> Tensor:
    """A vector over the concatenated heads [H * Dv] as [H, 1, Dv]."""
    return vector.view(output.shape[1], 1, output.shape[3])
