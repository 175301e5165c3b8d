"""Which implementation runs a call. An explicit request is obeyed or refused, never replaced."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from reluformer.errors import UserError
from reluformer.ops.backends import fused, reference, sdpa
from reluformer.ops.call import AttentionResult, Call
from reluformer.ops.definition import Attention

log = logging.getLogger("reluformer")

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Implementation:
    """How attentions run: `why_not` says in one clause why a call cannot, or None if it can."""

    run: Callable[[Attention, Call, Options], AttentionResult]
    why_not: Callable[[Attention, Call, Options], str | None]
    device: str | None = None
    """`auto` considers it on this kind of device only; None means on all."""
    opaque: bool = False
    """Whether compilers see one operator in its place, and nothing of what it does."""


def _anything(attention: Attention, call: Call, options: Options) -> str | None:
    return None


IMPLEMENTATIONS: dict[str, Implementation] = {
    "triton": Implementation(fused.triton_run, fused.triton_why_not, device="cuda", opaque=True),
    "cpu": Implementation(fused.cpu_run, fused.cpu_why_not, device="cpu"),
    "sdpa": Implementation(sdpa.run, sdpa.why_not),
    "reference": Implementation(reference.run, _anything),
}
"""Fastest first; `impl="auto"` takes the first that can run the call."""


def run(attention: Attention, call: Call, options: Options, impl: str) -> AttentionResult:
    """Run the call with the implementation that `impl` names."""
    name = choose(attention, call, options, impl)
    # A compiler cannot trace a logger.
    if not torch.compiler.is_compiling():
        _log_once(attention.name, name, call.q.device.type)
    return IMPLEMENTATIONS[name].run(attention, call, options)


def choose(attention: Attention, call: Call, options: Options, impl: str) -> str:
    """Name of the implementation for this call; `auto` takes the fastest that supports it."""
    if impl == "auto":
        return next(
            name
            for name, implementation in IMPLEMENTATIONS.items()
            if implementation.device in (None, call.q.device.type)
            and implementation.why_not(attention, call, options) is None
        )
    if impl not in IMPLEMENTATIONS:
        allowed = ", ".join(["auto", *IMPLEMENTATIONS])
        raise UserError(f"impl must be one of {allowed}, got {impl!r}")
    reason = IMPLEMENTATIONS[impl].why_not(attention, call, options)
    if reason is not None:
        raise UserError(f"impl={impl!r} cannot run this {attention.name} attention: {reason}")
    return impl


@cache
def _log_once(attention: str, implementation: str, device: str) -> None:
    log.info("%s attention runs on %s with impl=%s", attention, device, implementation)
