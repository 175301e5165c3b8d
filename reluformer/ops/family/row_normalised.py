"""Attentions normalised over the row: softmax and what replaces or amends it.

Every function maps `Scores` to weights [..., Tq, Tk]. Hidden keys enter no sum, maximum or minimum,
and a row that sees nothing gets zeros.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from reluformer.errors import UserError
from reluformer.ops.memory import Scores, hide
from reluformer.ops.rule import per_head


def softmax(scores: Scores) -> Tensor:
    """exp(s) / sum exp(s)."""
    return _divide(*_exponentials(scores, scores.peak()))


def sink(scores: Scores, *, sink: float | Tensor = 0.0) -> Tensor:
    """exp(s) / (exp(b) + sum exp(s)): a softmax with one more key of score b and value zero.

    `sink` is b, a number or one value per head [H].
    """
    level = per_head(sink)
    peak = scores.peak().clamp_min(level.detach() if isinstance(level, Tensor) else level)
    exponentials, total = _exponentials(scores, peak)
    return exponentials / (total + (level - peak).exp())


def softmax1(scores: Scores) -> Tensor:
    """exp(s) / (1 + sum exp(s)): no head is forced to attend."""
    return sink(scores, sink=0.0)


def ssmax(scores: Scores, *, temperature: float | Tensor = 1.0) -> Tensor:
    """softmax(t_h ln(n) s): the sharpness grows with the length; t_h is a number or [H]."""
    return softmax(scores.times(per_head(temperature) * scores.n.clamp_min(1).log()))


def softpick(scores: Scores, *, epsilon: float = 1e-6) -> Tensor:
    """ReLU(e^s - 1) / (sum |e^s - 1| + epsilon)."""
    if not epsilon > 0:
        raise UserError(f"epsilon must be greater than 0, got {epsilon}")
    # Numerator and denominator are shifted alike by m = max(0, row maximum); epsilon follows.
    shift = scores.peak().clamp_min(0)
    floor = (-shift).exp()
    excess = hide((scores.hidden_as(-torch.inf) - shift).exp() - floor, scores.visible)
    return excess.relu() / (excess.abs().sum(dim=-1, keepdim=True) + epsilon * floor)


def cog(scores: Scores) -> Tensor:
    """sign(s) softmax(|s|). The paper keeps softmax in the first and the last layer."""
    sizes = Scores(scores.values.abs(), scores.visible, scores.width)
    return scores.values.sign() * softmax(sizes)


def self_adjust(scores: Scores) -> Tensor:
    """s softmax(s)."""
    return scores.values * softmax(scores)


def self_adjust_normalised(scores: Scores) -> Tensor:
    """(s - min(s_min, 0)) / (max(s_max, 0) - min(s_min, 0)) softmax(s)."""
    high = scores.hidden_as(-torch.inf).amax(dim=-1, keepdim=True).clamp_min(0)
    low = scores.hidden_as(torch.inf).amin(dim=-1, keepdim=True).clamp_max(0)
    spread = high - low
    # All scores zero: 0 / 0 in the paper's formula, no weight here.
    spread = spread + (spread == 0)
    return (scores.values - low) / spread * softmax(scores)


def top_k(scores: Scores, *, keep: int = 8) -> Tensor:
    """softmax over the `keep` largest scores of the row, or over all where fewer are visible.

    Keys that tie with the last one kept are kept too, so that the order of keys does not matter.
    """
    if not isinstance(keep, int) or keep < 1:
        raise UserError(f"keep must be a whole number of at least 1, got {keep}")
    values = scores.hidden_as(-torch.inf)
    kept = values.detach() >= _kth_largest(values.detach(), keep)
    visible = kept if scores.visible is None else kept & scores.visible
    return softmax(Scores(hide(values, visible), visible, scores.width))


def assa(scores: Scores, *, mix: Tensor | None = None) -> Tensor:
    """a softmax(s) + b ReLU(s)^2 with (a, b) = softmax(mix); `mix` is [2], ones by default.

    The squared branch is unnormalised, as in the paper.
    """
    shares = (scores.values.new_ones(2) if mix is None else mix).softmax(0)
    return shares[0] * softmax(scores) + shares[1] * scores.values.relu().square()


def lssa(scores: Scores) -> Tensor:
    """softplus(ln D ln n cos(q, k)), divided by its row sum."""
    sharpness = math.log(scores.width) * scores.n.clamp_min(1).log()
    weights = functional.softplus(scores.times(sharpness).values)
    return _share(weights, scores.visible)


def lssar(scores: Scores, *, power: float = 3.0) -> Tensor:
    """ReLU(n A - 1)^power, divided by its row sum, with A = lssa; no offset while n <= 3."""
    if not power > 0:
        raise UserError(f"power must be greater than 0, got {power}")
    n = scores.n
    lifted = (n * lssa(scores) - (n > 3).to(n.dtype)).relu()
    # Powers of numbers up to n overflow; the row sum cancels a division by the row maximum.
    peak = lifted.detach().amax(dim=-1, keepdim=True)
    return _share((lifted / (peak + (peak == 0))) ** power, scores.visible)


def differential(first: Scores, *, second: Scores, lam: float | Tensor = 0.2) -> Tensor:
    """softmax(s1) - lambda softmax(s2), s1 and s2 from the two halves of D.

    `lam` is lambda, a number or one value per head [H]; 0.2 is the paper's start in layer 0.
    The paper computes lambda as exp(a.b) - exp(c.d) + lambda_init from learned vectors, with
    lambda_init = 0.8 - 0.6 exp(-0.3 layer); here lambda is free and starts alike in all layers.
    """
    return softmax(first) - per_head(lam) * softmax(second)


def _kth_largest(values: Tensor, k: int) -> Tensor:
    """The k-th largest entry of each row, or the smallest of a shorter row: [..., Tq, 1]."""
    if torch.compiler.is_exporting():
        # torch cannot prove that min(k, Tk) <= Tk; Tk + k is at least k.
        values = functional.pad(values, (0, k), value=-torch.inf)
    else:
        k = min(k, values.shape[-1])
    return values.topk(k, dim=-1).values[..., -1:]


def _exponentials(scores: Scores, peak: Tensor) -> tuple[Tensor, Tensor]:
    """exp(s - peak), zero where hidden, and its row sum."""
    exponentials = (scores.hidden_as(-torch.inf) - peak).exp()
    return exponentials, exponentials.sum(dim=-1, keepdim=True)


def _divide(weights: Tensor, total: Tensor) -> Tensor:
    # An empty row has weights 0 and total 0; dividing by 1 there keeps value and gradient 0.
    return weights / (total + (total == 0))


def _share(weights: Tensor, visible: Tensor | None) -> Tensor:
    """Non-negative weights divided by their sum over the visible keys."""
    weights = hide(weights, visible)
    return _divide(weights, weights.sum(dim=-1, keepdim=True))
