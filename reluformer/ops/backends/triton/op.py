"""Rectified attention on the Triton kernels: the entry points.

They never wait for the device and take lengths as plain integers.
"""

import importlib.util
import os
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from reluformer.ops.backends.torch_state import autocast_dtype
from reluformer.ops.backends.triton.layout import last_contiguous, packed_view
from reluformer.ops.backends.triton.operators import attend as run_operator
from reluformer.ops.backends.triton.operators import attend_pages
from reluformer.ops.call import Call, KernelResult
from reluformer.ops.rule import POWERS, POWERS_IN_WORDS, Rectified

if TYPE_CHECKING:
    from reluformer.ops.paged_cache import PagedCache

WIDTHS = (16, 32, 64, 96, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def why_not(call: Call, rule: Rectified) -> str | None:
    """One clause that says why the kernels cannot run this call, or None if they can."""
    return supports(call.q, call.k, call.v, scale=call.scale, power=rule.power)


def supports(q: Tensor, k: Tensor, v: Tensor, *, scale: float, power: int) -> str | None:
    """None if the kernels can run this call (q [B, H, Tq, D] or [N, H, D]), else the reason.

    Neither Triton nor a GPU is needed to ask, and a compiler can trace the question.
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
    if power > 2 and (autocast_dtype(q) or q.dtype) == torch.float16:
        # Weights are packed before they are normalised, and it holds neither 16^4 nor 0.01^4.
        return f"power {power} needs bfloat16 or float32, got float16"
    if not scale > 0:
        return f"scale must be positive, got {scale}"
    return None


def _missing(device: str) -> str | None:
    """What this machine lacks."""
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
    if torch.cuda.get_device_capability()[0] < 8:
        return "the GPU's compute capability must be 8.0 or newer"
    return None


def attend(call: Call, rule: Rectified) -> KernelResult:
    """Attention with weights max(s - threshold, 0)^power / (gamma (n / 2)^length_exponent).

    Any strides with a contiguous last dimension; `gamma` and `threshold` of the rule are numbers or
    contiguous [H]. Returns the output and, [B, H, Tq] float32 ([N, H] for packed calls), sum_j w
    and sum_j w log w as far as the call requests them, both of the weights before dropout and row
    normalisation. Everything is differentiable in q, k, v, gamma and threshold, and repeatable bit
    by bit. With packed sequences, rows past the last sequence are zero.
    """
    q, k, v, packing, rules = call.q, call.k, call.v, call.packing, call.visibility
    dtype = autocast_dtype(q)
    if dtype is not None:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if packing is not None:
        q, k, v = packed_view(q), packed_view(k), packed_view(v)
    seed = None
    if call.dropout_p > 0:
        seed = torch.randint(1 << 62, (1,), dtype=torch.int64, device=q.device)
    gamma, threshold, statistics = rule.gamma, rule.threshold, call.statistics
    out, row_sum, log_sum, _ = run_operator(
        last_contiguous(q),
        last_contiguous(k),
        last_contiguous(v),
        gamma if isinstance(gamma, Tensor) else None,
        threshold if isinstance(threshold, Tensor) else None,
        None if rules.key_lengths is None else rules.key_lengths.contiguous(),
        rules.mask,
        None if packing is None else packing.cu_q.contiguous(),
        None if packing is None else packing.cu_k.contiguous(),
        seed,
        float(call.scale),
        1.0 if isinstance(gamma, Tensor) else float(gamma),
        0.0 if isinstance(threshold, Tensor) else float(threshold),
        float(rule.length_exponent),
        rule.power,
        rules.causal,
        rules.window or 0,
        float(call.dropout_p),
        q.shape[2] if packing is None else packing.max_q,
        k.shape[2] if packing is None else packing.max_k,
        call.entropy_every,
        float(rule.row_normalise or 0.0),
        statistics if rule.row_normalise is None else max(statistics, 1),
    )
    if packing is not None:
        out = out[0].transpose(0, 1)
    return KernelResult(
        out, row_sum if statistics >= 1 else None, log_sum if statistics >= 2 else None
    )


def paged_attention(
    q: Tensor, pages: "PagedCache", rule: Rectified, *, scale: float, causal: bool
) -> Tensor:
    """Attention from q [B, H, Tq, D] to the pages of a cache, [B, H, Tq, Dv], without gradients.

    Row i of a sequence of n keys stands at key n - Tq + i; the other arguments and the result are
    those of `reluformer.ops.paged_cache.decode_attention`.
    """
    gamma, threshold = rule.gamma, rule.threshold
    out: Tensor = attend_pages(
        last_contiguous(q),
        pages.keys,
        pages.values,
        pages.table,
        pages.lengths,
        pages.key_min,
        pages.key_max,
        gamma if isinstance(gamma, Tensor) else None,
        threshold if isinstance(threshold, Tensor) else None,
        float(scale),
        1.0 if isinstance(gamma, Tensor) else float(gamma),
        0.0 if isinstance(threshold, Tensor) else float(threshold),
        float(rule.length_exponent),
        rule.power,
        causal,
        float(rule.row_normalise or 0.0),
    )
    return out
