"""Row-normalised powers of ReLU with thresholds, called through the public function."""

from typing import Any

import torch
from torch import Tensor

from reluformer.bench.cases import Case
from reluformer.bench.contestant import Contestant
from reluformer.model.config import AttentionConfig
from reluformer.ops.api import relu_attention
from reluformer.ops.backends.triton import op as triton
from reluformer.ops.call import Call
from reluformer.ops.rule import Rectified
from reluformer.ops.visibility import Visibility

DEFAULT = "ReLU^4 / sum"
_RULES = {
    "ReLU / (1 + sum)": AttentionConfig(power=1, row_normalise=1.0),
    "ReLU^2 / sum": AttentionConfig(power=2),
    DEFAULT: AttentionConfig(),
    "ReLU^8 / sum": AttentionConfig(power=8),
}
OTHERS = tuple(name for name in _RULES if name != DEFAULT)


def rules(case: Case) -> list[Contestant]:
    """The default attention of models and its relatives with other powers.

    Elsewhere than on a GPU only the default takes part, to save time.
    """
    names = _RULES if case.device == "cuda" else (DEFAULT,)
    return [as_in_models(name, case, _RULES[name]) for name in names]


def as_in_models(
    name: str, case: Case, config: AttentionConfig, *, with_row_sums: bool = False
) -> Contestant:
    """An attention as models call it, with one threshold for each head.

    Args:
        name: Name of the contestant.
        case: The case.
        config: The attention.
        with_row_sums: Whether row sums are returned, as for the loss on them.
    """

    def options(batch: int, heads: int) -> dict[str, Any]:
        threshold = torch.full((heads,), config.first_threshold, device=case.device)
        return {**config.fixed_options, "threshold": threshold}

    settings = options(case.batch, case.heads)
    settings["impl"] = "triton" if on_triton(case) else "cpu"

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        if not with_row_sums:
            return (relu_attention(q, k, v, causal=case.causal, **settings),)
        result = relu_attention(q, k, v, causal=case.causal, return_sums="row_sum", **settings)
        return result.output, result.sums.row_sum

    return Contestant(
        name, "relu", run, case, on_triton(case), options=options,
        statistics=int(with_row_sums), power=config.power,
    )  # fmt: skip


def on_triton(case: Case) -> bool:
    """Whether the Triton kernels run the case; otherwise the CPU backend does."""
    like = torch.empty(1, 1, 1, case.width, device=case.device, dtype=getattr(torch, case.dtype))
    return triton.why_not(Call(like, like, like, Visibility(), scale=1.0), Rectified()) is None
