"""A memory: weights(q K^T) V, the operation that attention and feed-forward layers share.

Attention reads a *local* memory, whose keys and values are other tokens. A feed-forward layer reads
a *global* one, whose keys and values are parameters. Both call `read`; they differ only in where K
and V come from and in the function from scores to weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from reluformer.ops.visibility import count_visible


@dataclass(frozen=True)
class Scores:
    """Scores, their visibility and the width of the queries: the input of a weight function."""

    values: Tensor
    """[..., Tq, Tk]; hidden entries are 0, whatever the hidden keys contain."""
    visible: Tensor | None
    """Bool, broadcastable to `values`, or None when every key is visible."""
    width: int
    """D, the width of the queries and keys that made the scores."""

    @property
    def n(self) -> Tensor:
        """Number of visible keys of each row, [..., Tq, 1], in the dtype of `values`."""
        return count_visible(self.visible, self.values.shape[-1], self.values)

    def hidden_as(self, fill: float) -> Tensor:
        """The values with hidden keys replaced by `fill`."""
        return hide(self.values, self.visible, fill)

    def peak(self) -> Tensor:
        """Largest visible score of each row, [..., Tq, 1], without gradient; 0 in an empty row."""
        peak = self.hidden_as(-torch.inf).detach().amax(dim=-1, keepdim=True)
        return peak.masked_fill(peak == -torch.inf, 0.0)

    def times(self, factor: Tensor | float) -> "Scores":
        """The same rows with every score multiplied by `factor`."""
        return Scores(self.values * factor, self.visible, self.width)


Weigh: TypeAlias = Callable[[Scores], Tensor]


def hide(tensor: Tensor, visible: Tensor | None, fill: float = 0.0) -> Tensor:
    """`tensor` with the entries that `visible` excludes set to `fill`."""
    return tensor if visible is None else tensor.masked_fill(~visible, fill)


def read(
    scores: Scores, values: Tensor, weigh: Weigh, dropout_p: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Read a memory: weights [..., Tq, Tk] from the scores, then weights @ values [..., Tq, Dv].

    The weights are masked here for every attention, so that a function with f(0) != 0 cannot leak.
    The returned weights are those before dropout. Weight functions are not called for a memory
    without keys.
    """
    if scores.values.shape[-1] == 0:
        return scores.values @ values, scores.values
    weights = hide(weigh(scores), scores.visible)
    if not (_narrower(weights, values) and torch.is_autocast_enabled(values.device.type)):
        weights = weights.to(values.dtype)
    kept = torch.dropout(weights, dropout_p, train=True) if dropout_p > 0 else weights
    return kept @ values, weights


def _narrower(weights: Tensor, values: Tensor) -> bool:
    """Whether autocast computed the weights in half precision and will round the values too."""
    return weights.element_size() < values.element_size()
