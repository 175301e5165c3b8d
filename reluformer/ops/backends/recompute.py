"""Gradients by recomputation with plain operations, where those of a fused kernel do not suffice.

Gradients of a fused kernel cannot be differentiated again, and a product with a hidden NaN may
spoil them. The backward pass of a kernel calls `gradients` in these cases.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from reluformer.ops.backends import reference
from reluformer.ops.call import Call
from reluformer.ops.rule import Rectified


def gradients(
    call: Call, rule: Rectified, grads: Sequence[Tensor | None], kept: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, gamma and threshold; differentiable if gradients are enabled.

    Args:
        call: The call of the kernel.
        rule: Its gamma and threshold are numbers or tensors [H].
        grads: Gradients of output, row sums and sums of w ln w; None for unused ones.
        kept: Dropout mask of the forward pass, divided by 1 - p, [B, H, Tq, Tk].

    Returns:
        A gradient for each of the five, None for numbers and for tensors that need none.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # A gradient must not flow from one input to another that it was computed from.
        inputs = [_alias(x) for x in (call.q, call.k, call.v, rule.gamma, rule.threshold)]
        q, k, v, gamma, threshold = inputs
        call = call._replace(q=q, k=k, v=v)
        results = reference.rectified(call, replace(rule, gamma=gamma, threshold=threshold), kept)
        used = [
            (out, grad)
            for out, grad in zip(results, grads, strict=True)
            if out is not None and grad is not None
        ]
        wanted = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
        computed = torch.autograd.grad(
            [out for out, _ in used],
            wanted,
            [grad.to(out.dtype) for out, grad in used],
            create_graph=create_graph,
            materialize_grads=True,
        ) if used else [torch.zeros_like(x) for x in wanted]  # fmt: skip
    slopes = iter(computed)
    return tuple(
        next(slopes) if isinstance(x, Tensor) and x.requires_grad else None for x in inputs
    )


def _alias(value: Any) -> Any:
    return value.view_as(value) if isinstance(value, Tensor) else value
