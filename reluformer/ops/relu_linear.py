"""ReLU(x K^T + b) as one product whose epilogue is ReLU: the first half of a feed-forward memory.

The library that multiplies on the GPU (cuBLASLt) can rectify what it is about to write, which saves
a pass that reads and writes [N, s]. torch reaches it by `_addmm_activation`, which has no gradient
and which its compiler takes apart again. So `reluformer::relu_linear` is opaque to a compiler, with
a fake and an autograd formula in plain operations, which has gradients of its own. Where nobody
watches operators, `relu_linear` leaves the dispatcher out: half of the time on the host.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from reluformer.ops.backends.torch_state import autocast_dtype, is_untraced, needs_grad

_HALF = (torch.bfloat16, torch.float16)


def pays(x: Tensor) -> bool:
    """Whether `relu_linear` beats a product and a ReLU: in half precision on a GPU.

    Not inside the transforms of `torch.func` nor where dual numbers may be around, both of which
    see through plain operations only.
    """
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return False
    return _product_dtype(x) in _HALF and _on_gpu(x)


def relu_linear(x: Tensor, keys: Tensor, bias: Tensor | None = None) -> Tensor:
    """ReLU(x K^T + b) [N, s] of x [N, w], keys [s, w] and a bias [s] or None.

    It is differentiable in all three, any number of times; autocast treats it like
    `functional.linear`. Whether ReLU of NaN is NaN or 0 is the choice of the library.
    """
    if autocast_dtype(x) is not None:
        dtype = _product_dtype(x)
        x, keys, bias = x.to(dtype), keys.to(dtype), None if bias is None else bias.to(dtype)
    if not is_untraced(x):
        watched: Tensor = torch.ops.reluformer.relu_linear.default(x, keys, bias)
        return watched
    if needs_grad(x, keys, bias):
        found: Tensor = _ReluLinear.apply(x, keys, bias)  # type: ignore[no-untyped-call]
        return found
    return _run(x, keys, bias)


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _product_dtype(x: Tensor) -> torch.dtype:
    """The type in which x is multiplied; autocast leaves float64 alone."""
    return x.dtype if x.dtype == torch.float64 else autocast_dtype(x) or x.dtype


def _run(x: Tensor, keys: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        # The epilogue takes no product without a bias.
        bias = x.new_zeros(keys.shape[0])
    found: Tensor = torch.ops.aten._addmm_activation.default(bias, x, keys.t())
    return found


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, keys, _ = inputs
    need_x, need_keys, *_ = ctx.needs_input_grad
    ctx.save_for_backward(x if need_keys else None, keys if need_x else None, output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, keys, hidden = ctx.saved_tensors
    need_x, need_keys, need_bias = ctx.needs_input_grad
    change = torch.ops.aten.threshold_backward.default(grad, hidden, 0)
    return (
        change @ keys if need_x else None,
        change.t() @ x if need_keys else None,
        change.sum(0) if need_bias else None,
    )


class _ReluLinear(torch.autograd.Function):
    """The operator with its formula, without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output = _run(*inputs)
        _save(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return _backward(ctx, *grads)


def _fake(x: Tensor, keys: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], keys.shape[0])


_library: Any = torch.library.Library("reluformer", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "relu_linear(Tensor x, Tensor keys, Tensor? bias) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("relu_linear", _run, "CompositeExplicitAutograd")
torch.library.register_fake("reluformer::relu_linear", _fake, lib=_library)
torch.library.register_autograd(
    "reluformer::relu_linear", _backward, setup_context=_save, lib=_library
)
