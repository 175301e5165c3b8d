"""The public functions: `attention` for the whole family, `relu_attention` for ReLUFormer.

`attend` runs a call: it checks the arguments, chooses a backend and calls it.
"""

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, overload

from torch import Tensor

from reluformer.ops.backends import fused, registry
from reluformer.ops.call import AttentionResult, Call
from reluformer.ops.checks import check_attention, check_contents
from reluformer.ops.definition import Attention
from reluformer.ops.family.table import ATTENTIONS, lookup
from reluformer.ops.gate import follow_autocast, resolve_call
from reluformer.ops.signature import CHOICES, Choice, remember, signature
from reluformer.ops.stats import SumsLevel
from reluformer.ops.visibility import Visibility

log = logging.getLogger("reluformer")


def attend(
    attention: Attention, call: Call, options: Mapping[str, Any], impl: str = "auto"
) -> AttentionResult:
    """Run a call: check it, choose a backend, compute.

    Args:
        attention: Row of `reluformer.ATTENTIONS`.
        call: The shared arguments.
        options: The attention's own options; missing ones have their default values.
        impl: Name of a backend, or "auto" for the fastest one that supports the call.

    Raises:
        UserError: If an argument is not allowed, or the named backend does not support the call.
    """
    call = follow_autocast(call)
    try:
        key = signature(attention.name, call, options, impl)
        choice = None if key is None else CHOICES.get(key)
    except (TypeError, RuntimeError):
        # An argument is not hashable, or a tensor has no shape; the checks below refuse it.
        key = choice = None
    if choice is not None and choice.prepared is not None:
        result = choice.prepared(call, options)
        if result is not None:
            return fused.finish(attention, call, options, result)
    # A prepared call that could not run is prepared again.
    prepares = key is not None and (choice is None or choice.prepared is not None)
    if choice is None:
        check_attention(attention, call, options)
        call, options = resolve_call(call, options)
        rule = attention.rectified(options)
        choice = Choice(registry.choose(attention, call, rule, impl), rule)
        if key is not None:
            _log_once(attention.name, choice.backend, call.q.device.type)
            remember(key, choice)
    backend = registry.BACKENDS[choice.backend]
    if isinstance(backend, registry.Program):
        return backend.run(attention, call, options)
    rule = choice.rule
    if rule is None or rule.has_tensors:
        rule = attention.rectified(options)
        assert rule is not None
    rule = fused.per_head_rule(rule, call.q)
    result = backend.attend(fused.with_cosines(attention, call), rule)
    if prepares and backend.prepare is not None and not attention.cosine:
        prepared = backend.prepare(call, rule, options)
        if prepared is not None:
            assert key is not None
            remember(key, choice._replace(prepared=prepared))
    return fused.finish(attention, call, options, result)


@cache
def _log_once(attention: str, backend: str, device: str) -> None:
    log.info("%s attention runs on %s with impl=%s", attention, device, backend)


def scale_or_default(attention: Attention, q: Tensor, scale: float | None) -> float:
    """The given scale, or the attention's default for the width of q."""
    if scale is not None:
        return scale
    # Other arguments than dense tensors are refused later.
    is_dense = isinstance(q, Tensor) and q.dim() > 0 and not q.is_nested
    return attention.default_scale(q.shape[-1] if is_dense else 1)


@overload
def attention(
    name: str, q: Tensor, k: Tensor, v: Tensor, *, return_weights: Literal[True], **arguments: Any
) -> AttentionResult: ...
@overload
def attention(
    name: str, q: Tensor, k: Tensor, v: Tensor, *, return_stats: Literal[True], **arguments: Any
) -> AttentionResult: ...
@overload
def attention(
    name: str, q: Tensor, k: Tensor, v: Tensor, *, return_sums: SumsLevel, **arguments: Any
) -> AttentionResult: ...
@overload
def attention(name: str, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Tensor: ...
def attention(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    key_lengths: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    impl: str = "auto",
    return_weights: bool = False,
    return_stats: bool = False,
    return_sums: SumsLevel | None = None,
    entropy_every: int = 1,
    check: bool = False,
    **options: Any,
) -> Tensor | AttentionResult:
    """Attend with the attention called `name`, a key of `reluformer.ATTENTIONS`.

    Examples:
        >>> out = attention("entmax15", q, k, v, causal=True)
        >>> out = attention("sink", q, k, v, sink=torch.zeros(8))  # an option of "sink"

    A query row that sees no key gives zeros. NaN or infinity in keys and values that a row cannot
    see does not change the row. The exception is a fused kernel (Triton or SDPA) on a GPU: if
    `causal`, `window` or `mask` hides the key, rows in the same tile as a row that sees it may be
    NaN. Keys past `key_lengths` have no effect on any device.

    While autocast is enabled, q, k and v are cast to its dtype, as for torch's
    `scaled_dot_product_attention`; options such as gamma keep their dtype.

    Args:
        name: Key of `reluformer.ATTENTIONS`.
        q: Queries [B, H, Tq, D]; q, k and v have one dtype.
        k: Keys [B, Hkv, Tk, D]; H is a multiple of Hkv.
        v: Values [B, Hkv, Tk, Dv].
        mask: Bool, broadcastable to [B, H, Tq, Tk]; True = visible.
        causal: Row i sees keys j <= i + Tk - Tq: aligned to the end, as with a KV cache.
        key_lengths: [B] int; batch element b sees keys j < key_lengths[b].
        window: Row i sees keys with |i + Tk - Tq - j| < window.
        scale: Factor on q.k; 1/sqrt(D) by default (1 for attentions on cosines).
        bias: Added to the scaled scores, broadcastable to [B, H, Tq, Tk]; -inf hides the key, as
            False in `mask` does.
        dropout_p: Dropout rate of the weights; applied whenever it is above 0.
        impl: Backend: "triton", "cpu", "sdpa" or "reference". "auto" takes the fastest one that
            supports the call; a named backend is never replaced by another.
        return_weights: Also return the weights [B, H, Tq, Tk], before dropout, norm and gate.
        return_stats: Also return row statistics, see `Stats`.
        return_sums: "row_sum" also returns the sum of each row's weights, "entropy" in addition
            the row's entropy, see `RowSums`. The fused kernels compute both with the output.
        entropy_every: N above 1 computes entropies for one block of 256 query rows in N only, a
            different one in each head; `RowSums.sampled` marks them, other entropies are 0.
        check: Also check the contents of tensors, which synchronises with a GPU.
        **options: Options of the attention; `ATTENTIONS[name].options` has their names.

    Returns:
        The output [B, H, Tq, Dv]; with any `return_` argument an
        `AttentionResult(output, weights, stats, sums)`.

    Raises:
        UserError: If an argument is not allowed, or `impl` does not support the call.
    """
    row = lookup(name)
    visibility = Visibility(mask, causal, key_lengths, window)
    extras = (return_weights, return_stats, return_sums)
    call = Call(
        q,
        k,
        v,
        visibility,
        scale_or_default(row, q, scale),
        bias,
        dropout_p,
        *extras,
        entropy_every,
    )
    if check:
        check_contents(row, follow_autocast(call), options)
    result = attend(row, call, options, impl)
    return result if any(extras) else result.output


@overload
def relu_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_weights: Literal[True], **arguments: Any
) -> AttentionResult: ...
@overload
def relu_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_stats: Literal[True], **arguments: Any
) -> AttentionResult: ...
@overload
def relu_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_sums: SumsLevel, **arguments: Any
) -> AttentionResult: ...
@overload
def relu_attention(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Tensor: ...
def relu_attention(  # type: ignore[misc]  # the overloads abridge the keywords
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    key_lengths: Tensor | None = None,
    window: int | None = None,
    gamma: float | Tensor = 1.0,
    length_exponent: float = 0.5,
    power: int = 1,
    threshold: float | Tensor = 0.0,
    negative_slope: float = 0.0,
    row_normalise: float | None = None,
    scale: float | None = None,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    impl: str = "auto",
    return_weights: bool = False,
    return_stats: bool = False,
    return_sums: SumsLevel | None = None,
    entropy_every: int = 1,
    check: bool = False,
) -> Tensor | AttentionResult:
    """ReLUFormer's attention: weights ReLU(s) / (gamma sqrt(n/2)), n the keys the row can see.

    In full, w = f(s - threshold)^power / (gamma (n/2)^length_exponent), f a (leaky) ReLU and
    s = scale q.k + bias. With `row_normalise`, each row of weights is divided by its sum.

    The defaults are the attention of the paper, which is the fastest and needs care in training.
    `attention("normalised_relu", q, k, v)` is the recommended one.

    Examples:
        >>> q, k, v = (torch.randn(2, 8, 100, 64) for _ in range(3))
        >>> out = relu_attention(q, k, v, causal=True)
        >>> out = relu_attention(q, k, v, power=4, threshold=-4.0, row_normalise=1e-4)

    Args:
        q: Queries [B, H, Tq, D]; q, k and v have one dtype.
        k: Keys [B, Hkv, Tk, D]; H is a multiple of Hkv.
        v: Values [B, Hkv, Tk, Dv].
        mask, causal, key_lengths, window: Keys that a row can see, as in `attention`.
        gamma: Number or [H], greater than 0; a larger gamma gives smaller weights.
        length_exponent: 0.5 is ReLUFormer, 1 (with gamma 2) is ReLU/n, 0 is plain ReLU.
        power: 1, 2, 4 or 8.
        threshold: Number or [H]; a negative threshold admits keys whose score is below zero.
        negative_slope: Slope below the threshold, 0 for an exact ReLU.
        row_normalise: Number added to each row's sum before the row is divided by it; None, as in
            the paper, leaves the rows unnormalised.
        scale, bias, dropout_p, impl: As in `attention`.
        return_weights, return_stats, return_sums, entropy_every, check: As in `attention`.

    Returns:
        The output [B, H, Tq, Dv]; with any `return_` argument an
        `AttentionResult(output, weights, stats, sums)`.

    Raises:
        UserError: If an argument is not allowed, or `impl` does not support the call.
    """
    row = ATTENTIONS["relu"]
    visibility = Visibility(mask, causal, key_lengths, window)
    extras = (return_weights, return_stats, return_sums)
    call = Call(
        q,
        k,
        v,
        visibility,
        scale_or_default(row, q, scale),
        bias,
        dropout_p,
        *extras,
        entropy_every,
    )
    options = {
        "gamma": gamma,
        "length_exponent": length_exponent,
        "power": power,
        "threshold": threshold,
        "negative_slope": negative_slope,
        "row_normalise": row_normalise,
    }
    if check:
        check_contents(row, follow_autocast(call), options)
    result = attend(row, call, options, impl)
    return result if any(extras) else result.output
