"""Rectified attention on the Triton kernels: the entry points.

They never wait for the device and take lengths as plain integers.
"""

import importlib.util
import os
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from reluformer.errors import UserError
from reluformer.ops.backends.torch_state import autocast_dtype
from reluformer.ops.backends.triton.layout import last_contiguous, packed_view
from reluformer.ops.backends.triton.operators import attend, attend_pages
from reluformer.ops.rule import POWERS, POWERS_IN_WORDS, Rectified

if TYPE_CHECKING:
    from reluformer.ops.paged_cache import PagedCache

WIDTHS = (16, 32, 64, 96, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _missing(device: str) -> str | None:
    """What this machine lacks."""
    if not _has_triton():
        return "the package triton is not installed"
    if device != "cuda":
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return None if interpreted else f"the kernels need CUDA tensors, and q is on {device}"
    return _missing_on_gpu()


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _missing_on_gpu() -> str | None:
    if torch.cuda.get_device_capability()[0] < 8:
        return "the GPU's compute capability must be 8.0 or newer"
    return None


def _call(
    q, k, v, *, scale, gamma, length_exponent, power, threshold, causal, window, key_lengths, mask,
    cu_q, cu_k, max_q, max_k, dropout_p, statistics, row_normalise, entropy_every=1,
):  # fmt: skip
    """Bring the arguments into the operator's form; q, k, v are [B, H, T, D]."""
    dtype = autocast_dtype(q)
    if dtype is not None:
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
    seed = None
    if dropout_p > 0:
        seed = torch.randint(1 << 62, (1,), dtype=torch.int64, device=q.device)
    out, row_sum, log_sum, _ = attend(
        last_contiguous(q),
        last_contiguous(k),
        last_contiguous(v),
        _per_head(gamma, heads),
        _per_head(threshold, heads),
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
        entropy_every,
        float(row_normalise or 0.0),
        statistics if row_normalise is None else max(statistics, 1),
    )
    return out, row_sum if statistics >= 1 else None, log_sum if statistics >= 2 else None


def _per_head(value: float | Tensor, heads: int) -> Tensor | None:
    """A tensor as contiguous [H]; None for a number, which is passed on its own."""
    if not isinstance(value, Tensor):
        return None
    return (value if value.shape == (heads,) else value.expand(heads)).contiguous()


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
    statistics: int,
    row_normalise: float | None = None,
    entropy_every: int = 1,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Attention with weights max(s - threshold, 0)^power / (gamma (n / 2)^length_exponent).

    q [B, H, Tq, D], k [B, Hkv, Tk, D], v [B, Hkv, Tk, Dv]; any strides with a contiguous last
    dimension. `gamma` and `threshold` are numbers or [H]; `key_lengths` [B]; `mask` is boolean and
    broadcasts to [B, H, Tq, Tk]; `causal` and `window` are aligned at the end. Returns the output
    [B, H, Tq, Dv] and, [B, H, Tq] float32, sum_j w if `statistics` is 1 or 2 and sum_j w log w if
    it is 2 (which costs a logarithm per weight), both of the weights before dropout, else None.
    With `row_normalise`, above 0, output rows are divided by sum_j w plus that number; the weights that
    statistics are of are not. Everything is differentiable in q, k, v, gamma and threshold, and
    repeatable bit by bit. Above 1, `entropy_every` makes sum_j w log w in the rows of
    `reluformer.ops.stats.sampled_rows` only: elsewhere it is 0, whatever the inputs are.
    """
    return _call(
        q, k, v, scale=scale, gamma=gamma, length_exponent=length_exponent, power=power,
        threshold=threshold, causal=causal, window=window, key_lengths=key_lengths, mask=mask,
        cu_q=None, cu_k=None, max_q=q.shape[2], max_k=k.shape[2], dropout_p=dropout_p,
        statistics=statistics, row_normalise=row_normalise, entropy_every=entropy_every,
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
    statistics: int,
    row_normalise: float | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`rectified_attention` over sequences packed one after the other, without padding.

    q [N, H, D], k [M, Hkv, D], v [M, Hkv, Dv]; sequence b holds rows cu_seqlens[b] to
    cu_seqlens[b + 1] (int32 or int64, [B + 1]), at most `max_q` and `max_k` of them. Returns
    [N, H, Dv] and, with `statistics`, [N, H] each; rows past the last sequence are zero.
    """
    out, row_sum, log_sum = _call(
        packed_view(q), packed_view(k), packed_view(v), scale=scale, gamma=gamma,
        length_exponent=length_exponent, power=power, threshold=threshold, causal=causal,
        window=window, key_lengths=None, mask=None, cu_q=cu_seqlens_q.contiguous(),
        cu_k=cu_seqlens_k.contiguous(), max_q=max_q, max_k=max_k, dropout_p=dropout_p,
        statistics=statistics, row_normalise=row_normalise,
    )  # fmt: skip
    return out[0].transpose(0, 1), row_sum, log_sum


def paged_attention(
    q: Tensor, pages: "PagedCache", rule: Rectified, *, scale: float, causal: bool
) -> Tensor:
    """Attention from q [B, H, Tq, D] to the pages of a cache, [B, H, Tq, Dv], without gradients.

    Row i of a sequence of n keys stands at key n - Tq + i; the other arguments and the result are
    those of `reluformer.ops.paged_cache.decode_attention`.
    """
    gamma, threshold, heads = rule.gamma, rule.threshold, q.shape[1]
    out: Tensor = attend_pages(
        last_contiguous(q),
        pages.keys,
        pages.values,
        pages.table,
        pages.lengths,
        pages.key_min,
        pages.key_max,
        _per_head(gamma, heads),
        _per_head(threshold, heads),
        float(scale),
        1.0 if isinstance(gamma, Tensor) else float(gamma),
        0.0 if isinstance(threshold, Tensor) else float(threshold),
        float(rule.length_exponent),
        rule.power,
        causal,
        float(rule.row_normalise or 0.0),
    )
    return out
