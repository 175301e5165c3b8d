"""Row sums and entropies of a fused implementation against the reference's."""

from typing import Any

import torch
from torch import Tensor

from reluformer import AttentionResult, attention
from reluformer.ops.stats import SumsLevel
from tests.ops.inputs import gradients


def check_sums(
    impl: str, level: SumsLevel, q: Tensor, k: Tensor, v: Tensor, *, rtol: float, **rules: Any
) -> None:
    """Output, sums and their gradients in q, k, v, gamma and threshold.

    Gradients are those of the row sums alone, or of output, row sums and entropies together.
    """
    heads = torch.linspace(0.6, 1.4, q.shape[1], dtype=q.dtype)
    leaves = [q, k, v, heads, heads - 1.03]
    found, wanted = (
        _run(way, level, [leaf.detach().to(dtype).requires_grad_() for leaf in leaves], rules)
        for way, dtype in ((impl, q.dtype), ("reference", torch.float64))
    )
    for name, tensor in wanted.items():
        tensor = tensor.double()
        scale = float(tensor.detach().abs().max()) if tensor.numel() else 0.0
        torch.testing.assert_close(
            found[name].double(), tensor, rtol=rtol, atol=rtol * max(scale, 1.0), msg=_named(name)
        )


def _run(
    impl: str, level: SumsLevel, leaves: list[Tensor], rules: dict[str, Any]
) -> dict[str, Tensor]:
    q, k, v, gamma, threshold = leaves
    result: AttentionResult = attention(
        "relu", q, k, v, gamma=gamma, threshold=threshold, impl=impl, return_sums=level, **rules
    )
    assert result.sums is not None
    made = {"output": result.output, **result.sums._asdict()}
    made = {name: tensor for name, tensor in made.items() if tensor is not None}
    sampled = level == "entropy" and rules.get("entropy_every", 1) > 1
    assert len(made) == (3 if level == "row_sum" else 4) + sampled
    differentiated = ["row_sum"] if level == "row_sum" else ["output", "row_sum", "entropy"]
    probed = torch.cat([made[name].flatten() for name in differentiated])
    grads = gradients(probed, leaves)
    names = ("q", "k", "v", "gamma", "threshold")
    return made | {f"d{name}": grad for name, grad in zip(names, grads, strict=True)}


def _named(name: str) -> Any:
    return lambda message: f"{name}: {message}"
