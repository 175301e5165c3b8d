"""The table of backends, and the choice of one for a call.

An explicitly requested backend runs the call or refuses it; it is never replaced by another.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from reluformer.errors import UserError
from reluformer.ops.backends import reference, sdpa
from reluformer.ops.backends.cpu import op as cpu
from reluformer.ops.backends.torch_state import in_transform, intercepts_operators
from reluformer.ops.backends.triton import op as triton
from reluformer.ops.call import AttentionResult, Call, KernelResult, Prepared
from reluformer.ops.definition import Attention
from reluformer.ops.gate import named_tensors
from reluformer.ops.rule import Rectified


@dataclass(frozen=True)
class Kernel:
    """A backend that computes rectified rules only; `fused` does the rest of the attention."""

    attend: Callable[[Call, Rectified], KernelResult]
    why_not: Callable[[Call, Rectified], str | None]
    """One clause that says why the kernel cannot run a call, or None if it can."""
    device: str | None = None
    """Device type on which `auto` considers the backend; None means any."""
    opaque: bool = False
    """Whether `torch.compile` sees a single operator in place of the kernel."""
    prepare: Callable[[Call, Rectified, Mapping[str, Any]], Prepared | None] | None = None
    """From a call that has run and its options to the form for repeated calls, if it has one."""


@dataclass(frozen=True)
class Program:
    """A backend in plain torch that computes whole attentions."""

    run: Callable[[Attention, Call, Mapping[str, Any]], AttentionResult]
    why_not: Callable[[Attention, Call], str | None]
    """One clause that says why the backend cannot run a call, or None if it can."""
    device: str | None = None
    """Device type on which `auto` considers the backend; None means any."""
    opaque: bool = False
    """Whether `torch.compile` sees a single operator in place of the backend."""
    is_slow: Callable[[Call], bool] = lambda call: False
    """Whether a later backend is faster for a call, so that `auto` passes over this one."""


Backend = Kernel | Program

BACKENDS: dict[str, Backend] = {
    "triton": Kernel(triton.attend, triton.why_not, "cuda", opaque=True, prepare=triton.prepare),
    "cpu": Kernel(cpu.attend, cpu.why_not, device="cpu"),
    "sdpa": Program(sdpa.run, sdpa.why_not, is_slow=sdpa.is_slow),
    "reference": Program(reference.run, reference.why_not),
}
"""Fastest first; `impl="auto"` takes the first backend that can run the call."""


def why_not(
    backend: Backend, attention: Attention, call: Call, rule: Rectified | None
) -> str | None:
    """One clause that says why the backend cannot run the call, or None if it can."""
    if isinstance(backend, Program):
        return backend.why_not(attention, call)
    if rule is None:
        return "fused kernels run rectified rules only"
    if call.return_weights or call.return_stats:
        return "fused kernels return neither weights nor statistics beyond `return_sums`"
    if call.bias is not None:
        return "fused kernels take no score bias"
    if rule.negative_slope != 0:
        return "fused kernels take no negative slope"
    if in_transform():
        return "fused kernels run neither in torch.func transforms nor in forward-mode AD"
    subclass = _foreign_subclass(call, rule)
    if subclass is not None:
        return f"fused kernels take no {subclass} next to a plain q"
    return backend.why_not(call, rule)


def _foreign_subclass(call: Call, rule: Rectified) -> str | None:
    """Name of a tensor subclass that replaces operators, in a call whose q does not."""
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or intercepts_operators(call.q):
        return None
    learned = {"gamma": rule.gamma, "threshold": rule.threshold}
    for _, tensor in named_tensors(call, learned):
        if intercepts_operators(tensor):
            return type(tensor).__name__
    return None


def choose(attention: Attention, call: Call, rule: Rectified | None, impl: str) -> str:
    """Name of the backend for this call; `auto` takes the fastest that supports it.

    rule is `attention.rectified(options)`.
    """
    if impl == "auto" and in_transform():
        # Transforms support plain operations only.
        impl = "reference"
    if impl == "auto":
        device = call.q.device.type
        for name, backend in BACKENDS.items():
            if backend.device not in (None, device) or why_not(backend, attention, call, rule):
                continue
            if not (isinstance(backend, Program) and backend.is_slow(call)):
                return name
    if not isinstance(impl, str) or impl not in BACKENDS:
        allowed = ", ".join(["auto", *BACKENDS])
        raise UserError(f"impl must be one of {allowed}, got {impl!r}")
    reason = why_not(BACKENDS[impl], attention, call, rule)
    if reason is not None:
        raise UserError(f"impl={impl!r} cannot run this {attention.name} attention: {reason}")
    return impl
