"""Context parallelism: attention over a sequence that no rank holds alone.

    sequence = ShardedSequence(length)                 # one for each length and process group
    q, k, v = (sequence.shard(t, dim=2) for t in (q, k, v))
    output = attention("relu", q, k, v, sequence, causal=True)
    whole = sequence.unshard(output, dim=2)

Outputs and gradients are those of one process with the whole sequence. What is *summed over the
ranks* is the loss: every rank adds its tokens' share, and no rank divides by more than it would
alone. Gradients of q, k and v are then complete. Gradients of what every rank holds a copy of
(gamma, threshold, a model's weights) are this rank's share, and the caller adds them up, as data
parallelism does: `torch.distributed.all_reduce`, or DDP or FSDP, which average, with the loss
multiplied by the number of ranks. Every rank must take part in each forward and backward pass.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.nn import functional

from reluformer.context_parallel import partial_sums
from reluformer.context_parallel.collectives import gather, scatter_sum
from reluformer.context_parallel.sharding import ShardedSequence
from reluformer.errors import UserError
from reluformer.ops.api import attend
from reluformer.ops.backends.fused import with_cosines
from reluformer.ops.call import AttentionResult, Call
from reluformer.ops.definition import Attention
from reluformer.ops.stats import Stats
from reluformer.ops.visibility import Visibility


@overload
def attention(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequence: ShardedSequence,
    *,
    return_stats: Literal[True],
    **arguments: Any,
) -> AttentionResult: ...
@overload
def attention(
    name: str, q: Tensor, k: Tensor, v: Tensor, sequence: ShardedSequence, **arguments: Any
) -> Tensor: ...
def attention(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequence: ShardedSequence,
    *,
    keys: ShardedSequence | None = None,
    causal: bool = False,
    key_lengths: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    move: Literal["keys", "queries"] = "keys",
    impl: str = "auto",
    return_stats: bool = False,
    **options: Any,
) -> Tensor | AttentionResult:
    """`reluformer.attention` of sharded q [B, H, 2c, D] to sharded k and v [B, Hkv, 2c, .].

    The result is the shard [B, H, 2c, Dv] of the output. All masks are about the whole sequence:

    sequence      how the queries lie on the ranks
    keys          how keys and values do, if they are another sequence (no causal mask then)
    causal        a token sees itself and what came before it in the whole sequence
    key_lengths   [B] int, the same on all ranks: tokens of the whole sequence that can be seen
    move          what travels. "keys": keys and values are gathered, and their gradients summed;
                  "queries": queries are gathered and partial outputs summed in float32,
                  with `row_normalise` together with partial row sums
    return_stats  also return the statistics of this shard's rows, with move="keys" only

    scale, dropout_p, impl and the options are those of `reluformer.attention`; what is dropped is
    drawn by each rank. Only attentions with a rectified rule are taken.
    """
    row = partial_sums.additive(name)
    call = partial_sums.checked_call(
        row,
        q,
        k,
        v,
        options,
        scale=scale,
        causal=causal,
        key_lengths=key_lengths,
        dropout_p=dropout_p,
        return_stats=return_stats,
    )
    if causal and keys not in (None, sequence):
        raise UserError("causal must be False where keys are another sequence than the queries")
    keys = keys or sequence
    sequence.check(q, 2, "q")
    keys.check(k, 2, "k")
    if move not in ("keys", "queries"):
        raise UserError(f"move must be 'keys' or 'queries', got {move!r}")
    # Under a causal mask padding comes after every token; else only its length hides it.
    hidden = keys.padded_length > keys.length and not causal
    if hidden or key_lengths is not None:
        end = torch.full((q.shape[0],), keys.length, device=q.device)
        seen = end if key_lengths is None else end.minimum(key_lengths.to(end)).clamp_min(0)
        call = call._replace(visibility=Visibility(causal=causal, key_lengths=seen))
    if move == "keys":
        result = _move_keys(row, call, sequence, keys, impl, options)
        return result if return_stats else result.output
    if return_stats:
        raise UserError("return_stats must be False with move='queries', got True")
    return _move_queries(row, call, sequence, keys, impl, options)


class _Piece(NamedTuple):
    """Rows that see the same keys, the first so many, but for a causal edge at their end."""

    rows: slice
    keys: int
    causal: bool


def _move_keys(
    row: Attention,
    call: Call,
    sequence: ShardedSequence,
    keys: ShardedSequence,
    impl: str,
    options: Mapping[str, Any],
) -> AttentionResult:
    """Own rows against all keys: each row is complete on its rank."""
    # Side by side, so that one collective moves both.
    both = gather(torch.cat([call.k, call.v], dim=-1), 2, keys.group)
    k, v = torch.split(both, [call.k.shape[-1], call.v.shape[-1]], dim=-1)
    call = call._replace(k=k, v=v)
    if call.visibility.causal:
        c = sequence.chunk
        ends = [(chunk + 1) * c for chunk in sequence.chunks]
        pieces = [_Piece(slice(at * c, (at + 1) * c), end, True) for at, end in enumerate(ends)]
    else:
        pieces = [_Piece(slice(None), k.shape[2], False)]
    results = []
    for piece in pieces:
        part = _cut(call, piece, call.visibility.key_lengths)
        results.append(attend(row, part, options, impl))
    stats = [result.stats for result in results if result.stats is not None]
    return AttentionResult(
        output=torch.cat([result.output for result in results], dim=2),
        weights=None,
        stats=Stats(*(torch.cat(f, dim=2) for f in zip(*stats, strict=True))) if stats else None,
    )


def _move_queries(
    row: Attention,
    call: Call,
    sequence: ShardedSequence,
    keys: ShardedSequence,
    impl: str,
    options: Mapping[str, Any],
) -> Tensor:
    """All rows against own keys: the ranks' sums add up to the output, but for its scale."""
    rules, rule = call.visibility, partial_sums.rule_of(row, options)
    call = with_cosines(row, call)
    part = call._replace(q=gather(call.q, 2, sequence.group))
    lengths = None if rules.key_lengths is None else keys.held(rules.key_lengths)
    pieces = (
        _causal_pieces(sequence)
        if rules.causal
        else [_Piece(slice(None), keys.shard_length, False)]
    )
    reads = [partial_sums.read(rule, _cut(part, piece, lengths), impl) for piece in pieces]
    sums = [torch.cat(each, dim=2) for each in zip(*reads, strict=True)]
    # The rows before this rank's first key see none of its keys.
    before = part.q.shape[2] - sums[0].shape[2]
    padded = [functional.pad(each, (0, 0, before, 0)) for each in sums]
    totals = scatter_sum(padded, 2, sequence.group)
    n = _visible(rules, sequence, keys, call.q.device)
    return partial_sums.combine(row, options, totals, n, call.q.dtype)


def _causal_pieces(sequence: ShardedSequence) -> list[_Piece]:
    """The rows from this rank's first chunk on, divided where the next of its keys come in options.

    Local keys lie in their order, so what a row sees of them is always the first so many.
    """
    c, (head, tail) = sequence.chunk, sequence.chunks
    pieces = [
        _Piece(slice(head * c, (head + 1) * c), c, True),
        _Piece(slice((head + 1) * c, tail * c), c, False),
        _Piece(slice(tail * c, (tail + 1) * c), 2 * c, True),
        _Piece(slice((tail + 1) * c, sequence.padded_length), 2 * c, False),
    ]
    return [piece for piece in pieces if piece.rows.start < piece.rows.stop]


def _cut(call: Call, piece: _Piece, lengths: Tensor | None) -> Call:
    """The part of a call that a piece is; `lengths` [B] are of the call's keys."""
    return call._replace(
        q=call.q[:, :, piece.rows],
        k=call.k[:, :, : piece.keys],
        v=call.v[:, :, : piece.keys],
        visibility=Visibility(
            causal=piece.causal,
            key_lengths=None if lengths is None else lengths.clamp(max=piece.keys),
        ),
    )


def _visible(
    rules: Visibility, sequence: ShardedSequence, keys: ShardedSequence, device: torch.device
) -> Tensor:
    """n: how many keys of the whole sequence the rows of this shard see, [B or 1, 1, 2c or 1]."""
    n = torch.full((1, 1, 1), keys.length, device=device)
    if rules.key_lengths is not None:
        n = rules.key_lengths.view(-1, 1, 1)
    return n.minimum(sequence.positions(device) + 1) if rules.causal else n
