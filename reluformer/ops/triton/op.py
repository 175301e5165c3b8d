"""Rectified attention as PyTorch operators: the entry points of the Triton kernels.

`reluformer::rectified_attention` is opaque to the compiler (no graph break), has a fake and an
autograd formula, never waits for the device and takes lengths as plain integers. Triton itself is
imported at the first call.
"""

import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from reluformer.errors import UserError
from reluformer.ops.triton.layout import empty_heads, last_contiguous, packed_view, row_values

WIDTHS = (16, 32, 64, 96, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? gamma, Tensor? threshold, Tensor? key_lengths, "
    "Tensor? mask, Tensor? cu_q, Tensor? cu_k, Tensor? seed"
)
_NUMBERS = (
    "float scale, float gamma_value, float threshold_value, float length_exponent, int power, "
    "bool causal, int window, float dropout_p, SymInt max_q, SymInt max_k"
)


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
    if power not in (1, 2):
        return f"power must be 1 or 2, got {power}"
    if not scale > 0:
        return f"scale must be positive, got {scale}"
    return None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _missing(device: str) -> str | None:
    """What this machine lacks, which does not change while it runs."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device != "cuda":
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return None if interpreted else f"the kernels need CUDA tensors, and q is on {device}"
    if torch.cuda.get_device_capability()[0] < 8:
        return "the GPU's compute capability must be 8.0 or newer"
    return None


def _problem(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    from reluformer.ops.triton.launch import Problem

    return Problem(*tensors, *numbers)


@torch.library.custom_op(
    "reluformer::rectified_attention",
    mutates_args=(),
    schema=f"({_TENSORS}, {_NUMBERS}, bool statistics, bool deterministic)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def _attention(
    q, k, v, gamma, threshold, key_lengths, mask, cu_q, cu_k, seed, *rest
):  # fmt: skip
    from reluformer.ops.triton import launch

    *numbers, statistics, _ = rest
    problem = _problem(
        (q, k, v, gamma, threshold, key_lengths, mask, cu_q, cu_k, seed), tuple(numbers)
    )
    return launch.forward(problem, statistics)


@_attention.register_fake
def _(q, k, v, gamma, threshold, key_lengths, mask, cu_q, cu_k, seed, *rest):
    *_, statistics, _ = rest
    packed = cu_q is not None
    return (
        empty_heads(q, v.shape[-1], zero=False),
        row_values(q, packed=packed, wanted=statistics),
        row_values(q, packed=packed, wanted=statistics),
        row_values(q, packed=packed, wanted=mask is not None),
    )


@torch.library.custom_op(
    "reluformer::rectified_attention_backward",
    mutates_args=(),
    schema="(Tensor? out, Tensor count, Tensor grad_out, Tensor? grad_sum, Tensor? grad_log, "
    f"{_TENSORS}, {_NUMBERS}, bool need_shift, bool deterministic)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _attention_backward(out, count, grad_out, grad_sum, grad_log, *rest):
    from reluformer.ops.triton import launch

    *arguments, need_shift, deterministic = rest
    problem = _problem(tuple(arguments[:10]), tuple(arguments[10:]))
    grads = launch.Gradients(out, count, last_contiguous(grad_out), grad_sum, grad_log)
    return launch.backward(problem, grads, need_shift, deterministic)


@_attention_backward.register_fake
def _(out, count, grad_out, grad_sum, grad_log, q, k, v, *rest):
    packed = rest[4] is not None
    need_shift = rest[-2]
    return (
        empty_heads(q, q.shape[-1], zero=False),
        empty_heads(k, k.shape[-1], zero=False),
        empty_heads(v, v.shape[-1], zero=False),
        row_values(q, packed=packed, wanted=out is not None),
        row_values(q, packed=packed, wanted=need_shift),
    )


def _save(ctx, inputs, output):
    tensors, (*numbers, _, deterministic) = inputs[:10], inputs[10:]
    out, row_sum, log_sum, count = output
    # Only the gradient of gamma needs results of the forward pass.
    kept = (out, row_sum, log_sum) if ctx.needs_input_grad[3] else (None, None, None)
    ctx.mark_non_differentiable(count)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *kept, count)
    ctx.numbers, ctx.deterministic = tuple(numbers), deterministic


def _backward(ctx, grad_out, grad_sum, grad_log, _):
    *tensors, out, row_sum, log_sum, count = ctx.saved_tensors
    q, _, v, gamma, threshold = tensors[:5]
    packed = tensors[7] is not None
    if grad_out is None:
        grad_out = q.new_zeros((*q.shape[:3], v.shape[-1]))
    wants_statistics = grad_sum is not None or grad_log is not None
    if wants_statistics:
        some = grad_sum if grad_sum is not None else grad_log
        grad_sum = torch.zeros_like(some) if grad_sum is None else grad_sum.contiguous()
        grad_log = None if grad_log is None else grad_log.contiguous()
    if grad_sum is not None and grad_sum.numel() == 0:
        grad_sum = grad_log = None
    need_gamma, need_shift = ctx.needs_input_grad[3:5]
    dq, dk, dv, row_dot, row_shift = _attention_backward(
        out if need_gamma else None, count, grad_out, grad_sum, grad_log, *tensors, *ctx.numbers,
        need_shift, ctx.deterministic,
    )  # fmt: skip
    over_rows = (0,) if packed else (0, 2)
    d_gamma = d_threshold = None
    if need_gamma:
        if grad_sum is not None:
            row_dot = row_dot + grad_sum * row_sum
        if grad_log is not None:
            row_dot = row_dot + grad_log * (row_sum + log_sum)
        d_gamma = (-row_dot.sum(over_rows) / gamma.float()).to(gamma.dtype)
    if need_shift:
        d_threshold = -row_shift.sum(over_rows).to(threshold.dtype)
    return dq, dk, dv, d_gamma, d_threshold, *([None] * (5 + len(ctx.numbers) + 2))


_attention.register_autograd(_backward, setup_context=_save)


def _call(
    q, k, v, *, scale, gamma, length_exponent, power, threshold, causal, window, key_lengths, mask,
    cu_q, cu_k, max_q, max_k, dropout_p, statistics, deterministic,
):  # fmt: skip
    """Bring the arguments into the operator's form; q, k, v are [B, H, T, D]."""
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    reason = supports(q, k, v, scale=scale, power=power)
    if reason is not None:
        raise UserError(reason)
    heads = q.shape[1]
    if heads % k.shape[1] or k.shape[1] != v.shape[1]:
        raise UserError(
            f"k and v must have a number of heads that divides the {heads} of q, "
            f"not {k.shape[1]} and {v.shape[1]}."
        )
    if window is not None and window < 1:
        raise UserError(f"window must be at least 1, not {window}.")
    per_head = {
        name: value.expand(heads).contiguous() if isinstance(value, Tensor) else None
        for name, value in (("gamma", gamma), ("threshold", threshold))
    }
    seed = None
    if dropout_p > 0:
        seed = torch.randint(1 << 62, (1,), dtype=torch.int64, device=q.device)
    out, row_sum, log_sum, _ = _attention(
        last_contiguous(q),
        last_contiguous(k),
        last_contiguous(v),
        per_head["gamma"],
        per_head["threshold"],
        None if key_lengths is None else key_lengths.contiguous(),
        mask,
        cu_q,
        cu_k,
        seed,
        float(scale),
        1.0 if isinstance(gamma, Tensor) else float(gamma),
        0.0 if isinstance(threshold, Tensor) else float(threshold),
        float(length_exponent),
        power,
        causal,
        window or 0,
        float(dropout_p),
        max_q,
        max_k,
        statistics,
        deterministic,
    )
    return (out, row_sum, log_sum) if statistics else (out, None, None)


def rectified_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    gamma: float | Tensor,
    length_exponent: float,
    power: int,
    threshold: float | Tensor,
    causal: bool,
    window: int | None,
    key_lengths: Tensor | None,
    mask: Tensor | None,
    dropout_p: float,
    statistics: bool,
    deterministic: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Attention with weights max(s - threshold, 0)^power / (gamma (n / 2)^length_exponent).

    q [B, H, Tq, D], k [B, Hkv, Tk, D], v [B, Hkv, Tk, Dv]; any strides with a contiguous last
    dimension. `gamma` and `threshold` are numbers or [H]; `key_lengths` [B]; `mask` is boolean and
    broadcasts to [B, H, Tq, Tk]; `causal` and `window` are aligned at the end. Returns the output
    [B, H, Tq, Dv] and, with `statistics`, sum_j w and sum_j w log w, [B, H, Tq] float32, both of
    the weights before dropout. Everything is differentiable in q, k, v, gamma and threshold. With
    `deterministic` off the backward may add into dQ in any order, which is faster.
    """
    return _call(
        q, k, v, scale=scale, gamma=gamma, length_exponent=length_exponent, power=power,
        threshold=threshold, causal=causal, window=window, key_lengths=key_lengths, mask=mask,
        cu_q=None, cu_k=None, max_q=q.shape[2], max_k=k.shape[2], dropout_p=dropout_p,
        statistics=statistics, deterministic=deterministic,
    )  # fmt: skip


def rectified_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    gamma: float | Tensor,
    length_exponent: float,
    power: int,
    threshold: float | Tensor,
    causal: bool,
    window: int | None,
    dropout_p: float,
    statistics: bool,
    deterministic: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`rectified_attention` over sequences packed one after the other, without padding.

    q [N, H, D], k [M, Hkv, D], v [M, Hkv, Dv]; sequence b holds rows cu_seqlens[b] to
    cu_seqlens[b + 1] (int32 or int64, [B + 1]), at most `max_q` and `max_k` of them. Returns
    [N, H, Dv] and, with `statistics`, two [N, H]; rows past the last sequence are zero.
    """
    out, row_sum, log_sum = _call(
        packed_view(q), packed_view(k), packed_view(v), scale=scale, gamma=gamma,
        length_exponent=length_exponent, power=power, threshold=threshold, causal=causal,
        window=window, key_lengths=None, mask=None, cu_q=cu_seqlens_q.contiguous(),
        cu_k=cu_seqlens_k.contiguous(), max_q=max_q, max_k=max_k, dropout_p=dropout_p,
        statistics=statistics, deterministic=deterministic,
    )  # fmt: skip
    return out[0].transpose(0, 1), row_sum, log_sum
