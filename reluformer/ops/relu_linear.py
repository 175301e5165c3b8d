"""ReLU(x K^T + b) as one product whose epilogue is ReLU: the first half of a feed-forward memory.

cuBLASLt can apply ReLU in the epilogue of a matrix product, which saves a pass over
[N, s]. torch exposes it as `_addmm_activation`, which has no gradient and which torch.compile
decomposes again. The operator `reluformer::relu_linear` is therefore opaque to compilers, with a
fake kernel and a twice differentiable autograd formula. Untraced calls bypass the dispatcher, which
halves the host time.
"""

from typing import Any

import torch
from torch import Tensor

from reluformer.ops.backends.torch_state import (
    autocast_dtype,
    in_transform,
    is_untraced,
    needs_grad,
)

_HALF = (torch.bfloat16, torch.float16)


def is_faster(x: Tensor) -> bool:
    """Whether `relu_linear` is faster than a product and a ReLU: in half precision on a GPU.

    False inside transforms of `torch.func` and under forward-mode differentiation, which support
    plain operations only.
    """
    if in_transform():
        return False
    return _product_dtype(x) in _HALF and _on_gpu(x)


def relu_linear(x: Tensor, keys: Tensor, bias: Tensor | None = None) -> Tensor:
    """ReLU(x K^T + b) [N, s] of x [N, w], keys [s, w] and a bias [s] or None.

    The result is differentiable in all three, any number of times; autocast treats the operation
    like `functional.linear`. ReLU of NaN is NaN or 0, depending on the library.
    """
    if autocast_dtype(x) is not None:
        dtype = _product_dtype(x)
        x, keys, bias = x.to(dtype), keys.to(dtype), None if bias is None else bias.to(dtype)
    if not is_untraced(x):
        traced: Tensor = torch.ops.reluformer.relu_linear.default(x, keys, bias)
        return traced
    if needs_grad(x, keys, bias):
        output: Tensor = _ReluLinear.apply(x, keys, bias)  # type: ignore[no-untyped-call]
        return output
    return _run(x, keys, bias)


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the product; autocast does not change float64."""
    return x.dtype if x.dtype == torch.float64 else autocast_dtype(x) or x.dtype


def _run(x: Tensor, keys: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        # The epilogue needs a bias.
        bias = x.new_zeros(keys.shape[0])
    output: Tensor = torch.ops.aten._addmm_activation.default(bias, x, keys.t())
    return output


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
    """The operator and its autograd formula without the dispatcher."""

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
