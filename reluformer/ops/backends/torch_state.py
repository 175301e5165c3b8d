"""What surrounds the call of an operator: autocast, gradients, and whoever watches operators."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


def is_untraced(tensor: Tensor) -> bool:
    """Whether nobody watches operators: no compiler, subclass (a fake), dispatch mode or vmap."""
    return not (
        torch.compiler.is_compiling()
        or type(tensor) is not Tensor
        or is_in_torch_dispatch_mode()
        or torch._C._are_functorch_transforms_active()
    )


def needs_grad(*values: object) -> bool:
    """Whether gradients of any of these are wanted; numbers and None have none."""
    return torch.is_grad_enabled() and any(
        isinstance(value, Tensor) and value.requires_grad for value in values
    )


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The type in which autocast would have this tensor's device compute, or None if it is off."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
