"""The state of torch around a call: autocast, gradients, tracing."""

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

PLAIN = (Tensor, nn.Parameter)
"""Classes of tensors whose operators nothing replaces."""


def is_untraced(tensor: Tensor) -> bool:
    """Whether no compiler, tensor subclass, dispatch mode or transform is active."""
    return not (
        torch.compiler.is_compiling()
        or type(tensor) not in PLAIN
        or is_in_torch_dispatch_mode()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def in_transform() -> bool:
    """Whether a transform of `torch.func` or forward-mode differentiation is active.

    They support plain operations only.
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def needs_plain_backward(*gradients: Tensor | None) -> bool:
    """Whether a backward pass must consist of plain operations.

    Its gradients will be differentiated again, or are batched (`is_grads_batched`).
    """
    if torch.is_grad_enabled():
        return True
    is_batched = torch._C._functorch.is_legacy_batchedtensor
    return any(gradient is not None and is_batched(gradient) for gradient in gradients)


def allows_tf32() -> bool:
    """Whether float32 matrix products on a GPU may round their inputs to TF32.

    `torch.get_float32_matmul_precision` raises where a precision was set by the newer switches,
    `fp32_precision` of `torch.backends`. This one knows both kinds.
    """
    precision: str = torch.backends.cuda.matmul.fp32_precision
    return precision == "tf32"


def prefers_onednn() -> bool:
    """Whether oneDNN computes float32 matrix products on a CPU (see `reluformer.products`)."""
    precision: str = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    return precision == "bf16"


def intercepts_operators(tensor: Tensor) -> bool:
    """Whether the tensor is of a subclass whose `__torch_dispatch__` replaces operators."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def needs_grad(*values: object) -> bool:
    """Whether a gradient of any of these is recorded; numbers and None have none."""
    if not torch.is_grad_enabled():
        return False
    # A loop is faster than `any` of a generator.
    for value in values:  # noqa: SIM110
        if isinstance(value, Tensor) and value.requires_grad:
            return True
    return False


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The dtype in which autocast computes on the tensor's device; None if autocast is off."""
    device = tensor.device.type
    # Autocast does not exist on the meta device, and torch raises for it.
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)
