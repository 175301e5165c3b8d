"""ReLU attention over packed sequences, stored one after the other without padding."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal, overload

import torch
from torch import Tensor

from reluformer.errors import UserError, quote
from reluformer.ops.api import attend, scale_or_default
from reluformer.ops.backends import fused, registry
from reluformer.ops.backends.torch_state import is_untraced
from reluformer.ops.backends.triton import op as triton
from reluformer.ops.call import AttentionResult, Call, Packing
from reluformer.ops.checks import INTS, MOST_KEYS, check_attention
from reluformer.ops.family.table import ATTENTIONS
from reluformer.ops.gate import check_call, follow_autocast, resolve_call
from reluformer.ops.rule import Rectified
from reluformer.ops.stats import RowSums, SumsLevel, row_sums
from reluformer.ops.visibility import Visibility

_LOOPS = ("auto", "cpu", "reference")


@overload
def relu_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_sums: SumsLevel,
    **arguments: Any,
) -> AttentionResult: ...
@overload
def relu_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_sums: Literal[None] = None,
    **arguments: Any,
) -> Tensor: ...
def relu_attention_varlen(  # type: ignore[misc]  # the overloads abridge the keywords
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    causal: bool = False,
    window: int | None = None,
    gamma: float | Tensor = 1.0,
    length_exponent: float = 0.5,
    power: int = 1,
    threshold: float | Tensor = 0.0,
    row_normalise: float | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    impl: str = "auto",
    return_sums: SumsLevel | None = None,
    check: bool = False,
) -> Tensor | AttentionResult:
    """`relu_attention` over packed sequences, with the signature of torch's `varlen_attn`.

    Sequence b holds the query rows cu_seq_q[b] to cu_seq_q[b + 1] and the keys cu_seq_k[b] to
    cu_seq_k[b + 1]; its queries see its own keys only. Sequences may be empty. Rows behind the last
    sequence are not read, and their output is zero.

    Args:
        q: Queries [N, H, D].
        k: Keys [M, Hkv, D]; H is a multiple of Hkv.
        v: Values [M, Hkv, Dv].
        cu_seq_q: Boundaries of the sequences in q, [B + 1] int32 or int64, from 0, ascending.
        cu_seq_k: Boundaries of the sequences in k and v, [B + 1].
        max_q: Largest number of query rows of a sequence, or an upper bound.
        max_k: Largest number of keys of a sequence, or an upper bound.
        causal: Row i of a sequence sees its keys j <= i + Tk - Tq.
        window: Row i sees keys with |i + Tk - Tq - j| < window.
        gamma, length_exponent, power, threshold, row_normalise, scale, dropout_p: As in
            `relu_attention`.
        impl: "triton" runs one kernel over all sequences. "cpu" and "reference" call that backend
            for each sequence, which reads the boundaries on the host. "auto" takes Triton on a GPU
            if it supports the call, and otherwise the fastest backend for each sequence.
        return_sums: "row_sum" or "entropy" also returns `RowSums`, each field [N, H].
        check: Also check the contents of the boundaries, which synchronises with a GPU; on a CPU
            they are always checked.

    Returns:
        The output [N, H, Dv]; with `return_sums` an `AttentionResult` whose `sums` are set.

    Raises:
        UserError: If an argument is not allowed, or `impl` does not support the call.
    """
    scale = scale_or_default(ATTENTIONS["relu"], q, scale)
    packing = Packing(cu_seq_q, cu_seq_k, max_q, max_k)
    options: Mapping[str, Any] = {
        "gamma": gamma,
        "length_exponent": length_exponent,
        "power": power,
        "threshold": threshold,
        "row_normalise": row_normalise,
    }
    visibility = Visibility(causal=causal, window=window)
    call = Call(
        q, k, v, visibility, scale, None, dropout_p, return_sums=return_sums, packing=packing
    )
    call = follow_autocast(call)
    _check(call, options)
    call, options = resolve_call(call, options)
    if check or (q.device.type == "cpu" and is_untraced(packing.cu_q)):
        _check_boundaries(call)
    rule = ATTENTIONS["relu"].rectified(options)
    assert rule is not None
    result = _packed(call, rule) if _use_triton(call, rule, impl) else _loop(call, options, impl)
    return result.output if return_sums is None else result


def _packed(call: Call, rule: Rectified) -> AttentionResult:
    """One kernel over all sequences."""
    output, row_sum, log_sum = triton.attend(call, fused.per_head_rule(rule, call.q))
    sums = None
    if row_sum is not None:
        sums = row_sums(row_sum, log_sum, _visible(call)[:, None])
    return AttentionResult(output.to(call.q.dtype), None, None, sums)


def _loop(call: Call, options: Mapping[str, Any], impl: str) -> AttentionResult:
    """One dense call for each sequence."""
    assert call.packing is not None
    q_ends, k_ends = call.packing.cu_q.tolist(), call.packing.cu_k.tolist()
    outputs: list[Tensor] = []
    sums: list[RowSums] = []
    for (q0, q1), (k0, k1) in zip(pairwise(q_ends), pairwise(k_ends), strict=True):
        # [T, H, D] as [1, H, T, D]
        q, k, v = (t.transpose(0, 1)[None] for t in (call.q[q0:q1], call.k[k0:k1], call.v[k0:k1]))
        dense = call._replace(q=q, k=k, v=v, packing=None)
        result = attend(ATTENTIONS["relu"], dense, options, impl)
        outputs.append(result.output[0].transpose(0, 1))  # [T, H, Dv]
        if result.sums is not None:
            sums.append(result.sums)
    rest = call.q.shape[0] - q_ends[-1]
    outputs.append(call.q.new_zeros(rest, call.q.shape[1], call.v.shape[2]))
    return AttentionResult(torch.cat(outputs), None, None, _joined(sums, rest) if sums else None)


def _joined(sums: list[RowSums], rest: int) -> RowSums:
    """Row sums of all sequences, each field [N, H]; `rest` rows behind the last one have zeros."""

    def join(fields: list[Tensor]) -> Tensor:
        rows = torch.cat([field[0].transpose(0, 1) for field in fields])
        return torch.nn.functional.pad(rows, (0, 0, 0, rest))

    entropies = [each.entropy for each in sums if each.entropy is not None]
    return RowSums(
        join([each.row_sum for each in sums]),
        join(entropies) if entropies else None,
        join([each.visible for each in sums]),
    )


def _visible(call: Call) -> Tensor:
    """n, the number of keys that each packed row sees, [N] int64; without synchronisation."""
    assert call.packing is not None
    cu_q, cu_k = call.packing.cu_q.long(), call.packing.cu_k.long()
    row = torch.arange(call.q.shape[0], device=call.q.device)
    sequence = torch.searchsorted(cu_q[1:], row, right=True)
    behind = sequence == cu_q.shape[0] - 1
    sequence = sequence.clamp(max=cu_q.shape[0] - 2)
    keys = cu_k[sequence + 1] - cu_k[sequence]
    # Position of the row among the keys of its sequence, aligned to the end.
    position = row - cu_q[sequence + 1] + keys
    low, high = torch.zeros_like(keys), keys
    if call.visibility.causal:
        high = torch.minimum(high, position + 1)
    if call.visibility.window is not None:
        high = torch.minimum(high, position + call.visibility.window)
        low = (position - call.visibility.window + 1).clamp(min=0)
    return (high - low).clamp(min=0).masked_fill(behind, 0)


def _use_triton(call: Call, rule: Rectified, impl: str) -> bool:
    """Whether the packed kernel runs the call; a named backend is never replaced."""
    if impl not in ("triton", *_LOOPS):
        raise UserError(f"impl must be one of triton, {', '.join(_LOOPS)}, got {impl!r}")
    if impl != "triton" and not (impl == "auto" and call.q.is_cuda):
        return False
    reason = registry.why_not(registry.BACKENDS["triton"], ATTENTIONS["relu"], call, rule)
    if impl == "triton" and reason is not None:
        raise UserError(f"impl='triton' cannot run this relu_attention_varlen: {reason}")
    return reason is None


def _check(call: Call, options: Mapping[str, Any]) -> None:
    """Raise a `UserError` if shapes, dtypes or numbers do not fit."""
    assert call.packing is not None
    for name, tensor in (("q", call.q), ("k", call.k), ("v", call.v)):
        if not isinstance(tensor, Tensor) or tensor.dim() != 3:
            shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise UserError(f"{name} must be a tensor of shape [N, heads, D], got {shape}")
    check_call(call, options)
    # As one sequence, [1, H, N, D], the call must pass the checks of a dense one.
    q, k, v = (t.transpose(0, 1)[None] for t in (call.q, call.k, call.v))
    check_attention(ATTENTIONS["relu"], call._replace(q=q, k=k, v=v), options)
    for name, ends in (("cu_seq_q", call.packing.cu_q), ("cu_seq_k", call.packing.cu_k)):
        if not isinstance(ends, Tensor) or ends.dtype not in INTS or ends.dim() != 1:
            kind = f"{ends.dtype} {list(ends.shape)}" if isinstance(ends, Tensor) else repr(ends)
            raise UserError(f"{name} must be an integer tensor of shape [B + 1], got {kind}")
    sizes = call.packing.cu_q.shape[0], call.packing.cu_k.shape[0]
    if sizes[0] != sizes[1] or sizes[0] < 2:
        raise UserError(
            f"cu_seq_q and cu_seq_k must hold B + 1 boundaries each for B >= 1, got {sizes}"
        )
    for name, size in (("max_q", call.packing.max_q), ("max_k", call.packing.max_k)):
        if type(size) is not int or not 0 <= size <= MOST_KEYS:
            raise UserError(
                f"{name} must be a whole number from 0 to {MOST_KEYS}, got {quote(size)}"
            )


def _check_boundaries(call: Call) -> None:
    """Raise a `UserError` unless the boundaries ascend from 0 within the tensors and the bounds."""
    assert call.packing is not None
    cu_q, cu_k, max_q, max_k = call.packing
    for name, ends, rows, most in (
        ("cu_seq_q", cu_q.tolist(), call.q.shape[0], max_q),
        ("cu_seq_k", cu_k.tolist(), call.k.shape[0], max_k),
    ):
        if ends[0] != 0 or ends != sorted(ends) or ends[-1] > rows:
            raise UserError(f"{name} must ascend from 0 to at most {rows}, got {ends}")
        longest = max(end - start for start, end in pairwise(ends))
        if longest > most:
            raise UserError(f"{name} must hold sequences of at most {most}, got {longest}")
