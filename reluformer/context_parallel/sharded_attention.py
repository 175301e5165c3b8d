"""Attention over a sequence that is sharded across ranks.

    sequence = ShardedSequence(length)                 # one for each length and process group
    q, k, v = (sequence.shard(t, dim=2) for t in (q, k, v))
    output = attention("relu", q, k, v, sequence, causal=True)
    whole = sequence.unshard(output, dim=2)

Outputs and gradients equal those of one process with the whole sequence. The loss is the *sum* of
the losses of all ranks, each over its own tokens. Gradients of q, k and v are then complete.
Gradients of replicated tensors (gamma, threshold, the weights of a model) are partial and must be
summed over the ranks: by `torch.distributed.all_reduce`, or by DDP or FSDP, which average, with the
loss multiplied by the number of ranks. All ranks must take part in each forward and backward pass.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.nn import functional

from reluformer.context_parallel import partial_sums
from reluformer.context_parallel.collectives import gather, scatter_sum
from reluformer.context_parallel.sharding import ShardedSequence, check_sequence
from reluformer.errors import UserError
from reluformer.ops.api import attend
from reluformer.ops.backends.fused import with_cosines
from reluformer.ops.call import AttentionResult, Call
from reluformer.ops.checks import check_attention, check_tensors
from reluformer.ops.definition import Attention
from reluformer.ops.gate import in_autocast_dtype
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
    """Attention of sharded queries to sharded keys and values.

    Equals `reluformer.attention` on the whole sequence. Masks refer to the whole sequence.

    Args:
        name: A rectified attention, such as "relu".
        q: This rank's queries [B, H, 2c, D].
        k: This rank's keys [B, Hkv, 2c, D].
        v: This rank's values [B, Hkv, 2c, Dv].
        sequence: Sharding of the queries.
        keys: Sharding of keys and values if it differs from that of the queries, as in
            cross-attention. Excludes `causal`.
        causal: Each token sees itself and all earlier tokens of the whole sequence.
        key_lengths: [B] int, the same on all ranks: number of visible tokens of the whole sequence.
        scale: Factor of the scores, as in `reluformer.attention`.
        dropout_p: Dropout rate of the weights; each rank draws its own mask.
        move: "keys" gathers keys and values, and sums their gradients over the ranks. "queries"
            gathers queries and sums partial outputs, and with `row_normalise` partial row sums, in
            float32.
        impl: Backend of the local computation, as in `reluformer.attention`.
        return_stats: Whether to return statistics of this shard's rows too; requires move="keys".
        **options: Options of the attention, as in `reluformer.attention`.

    Returns:
        This rank's shard of the output [B, H, 2c, Dv], or an `AttentionResult` with statistics.

    Raises:
        UserError: If an argument is not allowed; nothing has been sent then.
    """
    row = partial_sums.additive(name)
    check_sequence("sequence", sequence)
    if keys is not None:
        check_sequence("keys", keys)
    q, k, v = in_autocast_dtype(q, k, v)
    check_tensors(q, k, v)
    call = Call(
        q,
        k,
        v,
        Visibility(causal=causal, key_lengths=key_lengths),
        row.default_scale(q.shape[-1]) if scale is None else scale,
        dropout_p=dropout_p,
        return_stats=return_stats,
    )
    check_attention(row, call, options)
    if causal and keys not in (None, sequence):
        raise UserError("causal must be False if keys is another sequence than that of the queries")
    keys = keys or sequence
    sequence.check(q, 2, "q")
    keys.check(k, 2, "k")
    if move not in ("keys", "queries"):
        raise UserError(f"move must be 'keys' or 'queries', got {move!r}")
    # A causal mask hides the padding, which comes last. Otherwise key lengths must hide it.
    has_visible_padding = keys.padded_length > keys.length and not causal
    if has_visible_padding or key_lengths is not None:
        end = torch.full((q.shape[0],), keys.length, device=q.device)
        visible = end if key_lengths is None else end.minimum(key_lengths.to(end)).clamp_min(0)
        call = call._replace(visibility=Visibility(causal=causal, key_lengths=visible))
    if move == "keys":
        result = _move_keys(row, call, sequence, keys, impl, options)
        return result if return_stats else result.output
    if return_stats:
        raise UserError("return_stats must be False with move='queries', got True")
    return _move_queries(row, call, sequence, keys, impl, options)


class _Piece(NamedTuple):
    """A block of query rows that attend to a prefix of the keys."""

    rows: slice
    keys: int
    """Length of the prefix."""
    causal: bool
    """Whether the last keys of the prefix are masked causally."""


def _move_keys(
    row: Attention,
    call: Call,
    sequence: ShardedSequence,
    keys: ShardedSequence,
    impl: str,
    options: Mapping[str, Any],
) -> AttentionResult:
    """Gather keys and values, and compute this rank's rows completely."""
    # One collective moves both.
    both = gather(torch.cat([call.k, call.v], dim=-1), 2, keys.group)
    k, v = torch.split(both, [call.k.shape[-1], call.v.shape[-1]], dim=-1)
    call = call._replace(k=k, v=v)
    if call.visibility.causal:
        c = sequence.chunk
        ends = [(chunk + 1) * c for chunk in sequence.chunks]
        pieces = [_Piece(slice(i * c, (i + 1) * c), end, True) for i, end in enumerate(ends)]
    else:
        pieces = [_Piece(slice(None), k.shape[2], False)]
    lengths = call.visibility.key_lengths
    results = [attend(row, _select(call, piece, lengths), options, impl) for piece in pieces]
    stats = [result.stats for result in results if result.stats is not None]
    return AttentionResult(
        output=torch.cat([result.output for result in results], dim=2),
        weights=None,
        stats=Stats(*(torch.cat(x, dim=2) for x in zip(*stats, strict=True))) if stats else None,
    )


def _move_queries(
    row: Attention,
    call: Call,
    sequence: ShardedSequence,
    keys: ShardedSequence,
    impl: str,
    options: Mapping[str, Any],
) -> Tensor:
    """Gather queries, sum over this rank's keys, and add the partial sums of all ranks."""
    visibility, rule = call.visibility, partial_sums.rule_of(row, options)
    call = with_cosines(row, call)
    gathered = call._replace(q=gather(call.q, 2, sequence.group))
    lengths = None if visibility.key_lengths is None else keys.held(visibility.key_lengths)
    pieces = (
        _causal_pieces(sequence)
        if visibility.causal
        else [_Piece(slice(None), keys.shard_length, False)]
    )
    parts = [
        partial_sums.sum_over_keys(rule, _select(gathered, piece, lengths), impl)
        for piece in pieces
    ]
    sums = [torch.cat(blocks, dim=2) for blocks in zip(*parts, strict=True)]
    # Rows before this rank's first key see none of its keys.
    before = gathered.q.shape[2] - sums[0].shape[2]
    padded = [functional.pad(each, (0, 0, before, 0)) for each in sums]
    totals = scatter_sum(padded, 2, sequence.group)
    n = _visible_keys(visibility, sequence, keys, call.q.device)
    return partial_sums.combine(row, options, totals, n, call.q.dtype)


def _causal_pieces(sequence: ShardedSequence) -> list[_Piece]:
    """Blocks of all rows that see keys of this rank under a causal mask.

    A shard keeps its keys in order, so each row sees a prefix of them.
    """
    c, (head, tail) = sequence.chunk, sequence.chunks
    pieces = [
        _Piece(slice(head * c, (head + 1) * c), c, True),
        _Piece(slice((head + 1) * c, tail * c), c, False),
        _Piece(slice(tail * c, (tail + 1) * c), 2 * c, True),
        _Piece(slice((tail + 1) * c, sequence.padded_length), 2 * c, False),
    ]
    return [piece for piece in pieces if piece.rows.start < piece.rows.stop]


def _select(call: Call, piece: _Piece, lengths: Tensor | None) -> Call:
    """The rows and keys of a piece; `lengths` [B] counts the visible keys of the call."""
    return call._replace(
        q=call.q[:, :, piece.rows],
        k=call.k[:, :, : piece.keys],
        v=call.v[:, :, : piece.keys],
        visibility=Visibility(
            causal=piece.causal,
            key_lengths=None if lengths is None else lengths.clamp(max=piece.keys),
        ),
    )


def _visible_keys(
    visibility: Visibility, sequence: ShardedSequence, keys: ShardedSequence, device: torch.device
) -> Tensor:
    """Number of keys of the whole sequence that this shard's rows see, [B or 1, 1, 2c or 1]."""
    n = torch.full((1, 1, 1), keys.length, device=device)
    if visibility.key_lengths is not None:
        n = visibility.key_lengths.view(-1, 1, 1)
    return n.minimum(sequence.positions(device) + 1) if visibility.causal else n
