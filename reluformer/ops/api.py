"""The public functions: `attention` for the whole family, `relu_attention` for ReLUFormer."""

from typing import Any, Literal, overload

from torch import Tensor

from reluformer.ops.call import AttentionResult
from reluformer.ops.family.table import lookup
from reluformer.ops.stats import SumsLevel


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
    name: str, q: Tensor, k: Tensor, v: Tensor, **arguments: Any
) -> Tensor | AttentionResult:
    """Attend with the member of the family called `name` (see `reluformer.ATTENTIONS`).

    q [B, H, Tq, D], k [B, Hkv, Tk, D], v [B, Hkv, Tk, Dv], with H a multiple of Hkv; the result is
    [B, H, Tq, Dv]. A row that can see no key gives zeros.

    mask            bool, broadcastable to [B, H, Tq, Tk]; True = visible
    causal          row i sees keys j <= i + Tk - Tq: aligned to the end, as with a cache
    key_lengths     [B] int; element b sees keys j < key_lengths[b]
    window          row i sees keys with |i + Tk - Tq - j| < window
    scale           factor on q.k; 1/sqrt(D) by default (1 for attentions on cosines)
    bias            added to the scaled scores, broadcastable to [B, H, Tq, Tk]
    dropout_p       dropout on the weights, applied whenever it is above 0
    impl            "auto" takes the fastest implementation that supports the call; a name is
                    obeyed or refused, never replaced
    return_weights  also return the weights [B, H, Tq, Tk], before dropout, norm and gate
    return_stats    also return row statistics, see `Stats`
    return_sums     "row_sum" also returns the sum of each row's weights, "entropy" that and the
                    row's entropy, see `RowSums`: what the regularisers need, and all that fused
                    kernels return, from the pass that makes the output
    entropy_every   above 1, only one block of 256 query rows in so many has its entropies computed,
                    another in each head; `RowSums.sampled` says which, the others are 0
    check           also check the contents of tensors, which waits for a GPU

    Further keywords are the options of that attention. With any `return_` argument the result is an
    `AttentionResult(output, weights, stats, sums)`, else the output alone.
    """
    return lookup(name)(q, k, v, **arguments)


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
    s = scale q.k + bias.

    gamma            number or [H], greater than 0; a larger one gives smaller weights
    length_exponent  0.5 is ReLUFormer, 1 (with gamma 2) is ReLU/n, 0 is plain ReLU
    power            1, 2, 3, 4 or 8
    threshold        number or [H]; negative opens keys whose score is below zero
    negative_slope   slope below the threshold, 0 for an exact ReLU
    row_normalise        divide each row by its sum plus this number; None, as in the paper, does not

    The other arguments are those of `attention`.
    """
    return lookup("relu")(
        q,
        k,
        v,
        mask=mask,
        causal=causal,
        key_lengths=key_lengths,
        window=window,
        gamma=gamma,
        length_exponent=length_exponent,
        power=power,
        threshold=threshold,
        negative_slope=negative_slope,
        row_normalise=row_normalise,
        scale=scale,
        bias=bias,
        dropout_p=dropout_p,
        impl=impl,
        return_weights=return_weights,
        return_stats=return_stats,
        return_sums=return_sums,
        entropy_every=entropy_every,
        check=check,
    )
