"""Rectified attention on the Triton kernels: the entry points.

They do not synchronise with the GPU: lengths are plain integers. Neither Triton nor a GPU is needed
to import this module.
"""

import importlib.util
import os
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from reluformer.ops.backends.torch_state import is_untraced, needs_grad
from reluformer.ops.backends.triton import operators
from reluformer.ops.backends.triton.layout import last_contiguous, packed_view
from reluformer.ops.backends.triton.portable.arguments import OptionalInputs
from reluformer.ops.backends.triton.problem import NO_INPUTS, Problem, Settings
from reluformer.ops.call import Call, KernelResult, Prepared
from reluformer.ops.rule import POWERS, POWERS_IN_WORDS, Rectified

if TYPE_CHECKING:
    from reluformer.ops.paged_cache import PagedCache

WIDTHS = (16, 32, 64, 96, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def why_not(call: Call, rule: Rectified) -> str | None:
    """One clause that says why the kernels cannot run this call, or None if they can."""
    return supports(call.q, call.k, call.v, scale=call.scale, power=rule.power)


def supports(q: Tensor, k: Tensor, v: Tensor, *, scale: float, power: int) -> str | None:
    """None if the kernels can run on these tensors, [B, H, T, D] or [N, H, D], else the reason.

    A compiler can trace this function.
    """
    missing = _missing(q.device.type)
    if missing is not None:
        return missing
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        return f"q, k and v must be bfloat16, float16 or float32, got {q.dtype}"
    for name, width in (("q", q.shape[-1]), ("v", v.shape[-1])):
        if width not in WIDTHS:
            return f"head widths must be one of {WIDTHS}, and {name} has {width}"
    if power not in POWERS:
        return f"power must be {POWERS_IN_WORDS}, got {power}"
    if power > 2 and q.dtype == torch.float16:
        # Weights are rounded before the row factor is applied; float16 holds neither 16^4 nor
        # 0.01^4.
        return f"power {power} needs bfloat16 or float32, got float16"
    if not scale > 0:
        return f"scale must be positive, got {scale}"
    return None


def _missing(device: str) -> str | None:
    """Why this machine cannot run the kernels on tensors of a device, or None."""
    if not _has_triton():
        return "the package triton is not installed"
    if device != "cuda":
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return None if interpreted else f"the kernels need CUDA tensors, and q is on {device}"
    return _missing_on_gpu()


# `torch.compiler.assume_constant_result` without its import of the compiler, which takes seconds.
_missing._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _missing_on_gpu() -> str | None:
    capability = torch.cuda.get_device_capability()
    if capability[0] < 8:
        return "the GPU's compute capability must be 8.0 or newer"
    from reluformer.ops.backends.triton.versions import warn_if_untested

    warn_if_untested(capability == (9, 0))
    return None


def attend(call: Call, rule: Rectified) -> KernelResult:
    """Attention with weights max(s - threshold, 0)^power / (gamma (n / 2)^length_exponent).

    The result is differentiable in q, k, v, gamma and threshold, and reproducible bit by bit.

    Args:
        call: A supported call; tensors may have any strides.
        rule: Its gamma and threshold are numbers or contiguous tensors [H].

    Returns:
        The output and the row sums that the call requests, of the weights before dropout and row
        normalisation. With packed sequences, rows past the last sequence are zero.
    """
    problem = _problem(call, rule)
    q, k, v, optional, _ = problem
    gamma, threshold = optional.gamma, optional.threshold
    statistics = call.statistics
    # Row normalisation divides by the row sums, so the kernel computes them.
    computed = statistics if rule.row_normalise is None else max(statistics, 1)
    if not is_untraced(q):
        outputs = operators.attend_traced(problem, computed)
    elif needs_grad(q, k, v, gamma, threshold):
        outputs = operators.RectifiedAttention.apply(  # type: ignore[no-untyped-call]
            q, k, v, gamma, threshold, problem, computed
        )
    else:
        outputs = operators.host().run_forward.forward(problem, computed)
    out, row_sum, log_sum, _ = outputs
    if call.packing is not None:
        out = out[0].transpose(0, 1)
    return KernelResult(
        out, row_sum if statistics >= 1 else None, log_sum if statistics >= 2 else None
    )


def prepare(call: Call, rule: Rectified, options: Mapping[str, Any]) -> Prepared | None:
    """The call that `attend` has just run, prepared for calls of the same signature.

    None for calls that are packed, masked or need copies of tensors, and where options are not
    gamma and threshold themselves.
    """
    q, k, v, visibility = call.q, call.k, call.v, call.visibility
    if call.packing is not None or visibility.mask is not None or call.dropout_p > 0:
        return None
    for value, name in ((rule.gamma, "gamma"), (rule.threshold, "threshold")):
        if isinstance(value, Tensor) and value is not options.get(name):
            return None
    lengths = visibility.key_lengths
    if any(t.stride(-1) != 1 for t in (q, k, v)) or not (
        lengths is None or lengths.is_contiguous()
    ):
        return None
    statistics = call.statistics if rule.row_normalise is None else max(call.statistics, 1)
    # Only now: it imports Triton.
    from reluformer.ops.backends.triton import prepared

    return prepared.prepare(_problem(call, rule), statistics)


def _problem(call: Call, rule: Rectified) -> Problem:
    """The call as the kernels receive it."""
    q, k, v = call.q, call.k, call.v
    packing, visibility = call.packing, call.visibility
    cu_q = cu_k = seed = None
    max_q, max_k = q.shape[-2], k.shape[-2]
    if packing is not None:
        q, k, v = packed_view(q), packed_view(k), packed_view(v)
        cu_q, cu_k = packing.cu_q.contiguous(), packing.cu_k.contiguous()
        max_q, max_k = packing.max_q, packing.max_k
    if call.dropout_p > 0:
        seed = torch.randint(1 << 62, (1,), dtype=torch.int64, device=q.device)
    settings = Settings(
        float(call.scale),
        max_q,
        max_k,
        *_rule_settings(rule),
        visibility.causal,
        visibility.window or 0,
        float(call.dropout_p),
        call.entropy_every,
        float(rule.row_normalise or 0.0),
    )
    gamma = rule.gamma if isinstance(rule.gamma, Tensor) else None
    threshold = rule.threshold if isinstance(rule.threshold, Tensor) else None
    lengths, mask = visibility.key_lengths, visibility.mask
    if mask is not None and is_untraced(call.q):
        # Operators do it when they run, because torch 2.11 cannot compile it.
        mask = mask.view(torch.uint8)
    # Plain calls share one object, which launches recognise.
    optional = NO_INPUTS
    if not (gamma is threshold is lengths is mask is cu_q is seed is None):
        optional = OptionalInputs(
            gamma,
            threshold,
            None if lengths is None else lengths.contiguous(),
            mask,
            cu_q,
            cu_k,
            seed,
        )
    return Problem(last_contiguous(q), last_contiguous(k), last_contiguous(v), optional, settings)


def _rule_settings(rule: Rectified) -> tuple[float, float, float, int]:
    """gamma_value, threshold_value, length_exponent and power of `Settings`."""
    gamma, threshold = rule.gamma, rule.threshold
    return (
        1.0 if isinstance(gamma, Tensor) else float(gamma),
        0.0 if isinstance(threshold, Tensor) else float(threshold),
        float(rule.length_exponent),
        rule.power,
    )


def paged_attention(
    q: Tensor, pages: "PagedCache", rule: Rectified, *, scale: float, causal: bool
) -> Tensor:
    """Attention from q [B, H, Tq, D] to the pages of a cache, without gradients.

    Args:
        q: The newest tokens; query i of a sequence of n keys has the key position n - Tq + i.
        pages: The cache, which contains these tokens.
        rule: Its gamma and threshold are numbers or contiguous tensors [H].
        scale: Factor of the scores.
        causal: Whether a query sees only keys up to its own position.

    Returns:
        [B, H, Tq, Dv].
    """
    capacity = pages.table.shape[1] * pages.keys.shape[2]
    settings = Settings(
        float(scale), q.shape[2], capacity, *_rule_settings(rule), causal,
        row_normalise=float(rule.row_normalise or 0.0),
    )  # fmt: skip
    optional = NO_INPUTS._replace(
        gamma=rule.gamma if isinstance(rule.gamma, Tensor) else None,
        threshold=rule.threshold if isinstance(rule.threshold, Tensor) else None,
        key_lengths=pages.lengths,
    )
    problem = Problem(last_contiguous(q), pages.keys, pages.values, optional, settings)
    return operators.attend_pages(problem, pages.table)
