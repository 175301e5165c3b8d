"""Checks that all ranks of a group run: sharded attention against one process, in float64."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from reluformer import attention, context_parallel
from reluformer.context_parallel import ShardedSequence, collectives
from reluformer.context_parallel.collectives import scatter_sum
from tests.context_parallel.processes import SIZES, Check, GroupFunction
from tests.ops.inputs import make, tensor_options

CHECKS: dict[str, Check] = {}
MOVES = ("keys", "queries")

# Divisible by 2, 4 and 6 chunks; by none of them; fewer tokens than chunks.
LENGTHS = (12, 13, 3)


def agree(
    group: dist.ProcessGroup,
    name: str = "relu",
    *,
    move: str,
    length: int = 13,
    heads: int = 4,
    kv_heads: int = 2,
    learned: bool = True,
    impl: str = "auto",
    lengths: tuple[int, int] | None = None,
    **arguments: Any,
) -> None:
    """Output, and gradients of all inputs and options, equal those of one process."""
    sequence = ShardedSequence(length, group)
    whole = make(rows=length, keys=length, heads=heads, kv_heads=kv_heads, requires_grad=True)
    options = tensor_options(name, whole[0], whole[2], requires_grad=True) if learned else {}
    if lengths is not None:
        arguments["key_lengths"] = torch.tensor(lengths)
    expected = attention(name, *whole, impl="reference", **arguments, **options)
    weights = torch.randn(expected.shape, dtype=torch.float64)
    wanted = torch.autograd.grad((expected * weights).sum(), [*whole, *options.values()])

    shards = [sequence.shard(each.detach(), 2).requires_grad_() for each in whole]
    own = {key: value.detach().clone().requires_grad_() for key, value in options.items()}
    output = context_parallel.attention(
        name, *shards, sequence, move=move, impl=impl, **arguments, **own
    )
    close(sequence.unshard(output, 2), expected)
    loss = (output * sequence.shard(weights, 2)).sum()
    found = torch.autograd.grad(loss, [*shards, *own.values()])
    for grad, want in zip(found[:3], wanted[:3], strict=True):
        close(grad, sequence.shard(want, 2))
    for grad, want in zip(found[3:], wanted[3:], strict=True):
        # The caller's reduction: each rank has a share.
        dist.all_reduce(grad, group=group)
        close(grad, want)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


# The CPU backend rounds tensor options to float32.
CPU: dict[str, Any] = {"impl": "cpu", "learned": False, "gamma": 1.3, "threshold": 0.2}

CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "padding": {"lengths": (2, 9)},
    "padding beyond both ends": {"lengths": (0, 40)},
    "causal padding": {"causal": True, "lengths": (1, 10)},
    "one key/value head": {"causal": True, "kv_heads": 1},
    "no head groups": {"causal": True, "kv_heads": 4},
    "numbers": {"learned": False, "causal": True, "gamma": 1.7, "threshold": -0.3, "scale": 0.5},
    "power two": {"power": 2, "causal": True},
    "length exponent 0": {"length_exponent": 0.0, "causal": True},
    "length exponent 0.8": {"length_exponent": 0.8, "lengths": (5, 13)},
    "negative slope": {"negative_slope": 0.2, "causal": True},
    # Rows that see nothing, rows without weight, and the learned options in both sums.
    "row-normalised squares": {"power": 2, "row_normalise": 0.1, "lengths": (0, 9)},
    "row-normalised fourth powers": {
        "power": 4,
        "row_normalise": 1e-4,
        "causal": True,
        "lengths": (1, 10),
    },
    "row-normalised, without masks": {**CPU, "power": 4, "row_normalise": 0.01, "causal": True},
    "without masks": {**CPU, "causal": True, "lengths": (4, 11)},
    "without masks, full": {**CPU, "lengths": (4, 11)},
    **{
        name: {"name": name, "causal": True, "lengths": (7, 13)}
        for name in (
            "relu_n", "rela", "squared_relu", "squared_relu_n2", "leaky_relu", "cosine_relu"
        )
    },
}  # fmt: skip
for _move in MOVES:
    for _name, _case in CASES.items():
        CHECKS[f"{_name}, {_move}"] = Check(partial(agree, move=_move, **_case))
    for _length in LENGTHS:
        for _causal in (False, True):
            CHECKS[f"length {_length}, causal {_causal}, {_move}"] = Check(
                partial(agree, move=_move, length=_length, causal=_causal)
            )
    CHECKS[f"one token, {_move}"] = Check(partial(agree, move=_move, length=1, causal=True))


def check(sizes: tuple[int, ...] = SIZES) -> Callable[[GroupFunction], GroupFunction]:
    """Register a function as a check for groups of these sizes."""

    def register(function: GroupFunction) -> GroupFunction:
        CHECKS[function.__name__] = Check(function, sizes)
        return function

    return register


@check()
def shards_hold_one_head_and_one_tail_chunk(group: dist.ProcessGroup) -> None:
    sequence, tokens = ShardedSequence(13, group), torch.arange(1, 14)
    shard = sequence.shard(tokens, 0)
    position = sequence.positions()
    assert shard.shape == position.shape == (sequence.shard_length,)
    assert shard.tolist() == [p + 1 if p < 13 else 0 for p in position.tolist()]
    first, last = position.view(2, -1)[:, 0].tolist()
    assert first + last == sequence.padded_length - sequence.chunk
    close(sequence.unshard(shard, 0), tokens)
    nested = torch.randn(2, 13, 3)
    close(sequence.unshard(sequence.shard(nested, -2), -2), nested)


@check()
def unshard_has_a_gradient(group: dist.ProcessGroup) -> None:
    sequence = ShardedSequence(7, group)
    whole = torch.randn(7, dtype=torch.float64)
    shard = sequence.shard(whole, 0).requires_grad_()
    (sequence.unshard(shard, 0) ** 2).sum().backward()
    # Every rank has computed the same loss.
    assert shard.grad is not None
    close(shard.grad, sequence.shard(2 * whole, 0) * sequence.ranks)


@check()
def queries_attend_to_another_sequence(group: dist.ProcessGroup) -> None:
    targets, sources = ShardedSequence(5, group), ShardedSequence(17, group)
    whole = make(rows=5, keys=17)
    for lengths in (None, torch.tensor([17, 6])):
        expected = attention("relu", *whole, key_lengths=lengths)
        for move in MOVES:
            q, (k, v) = targets.shard(whole[0], 2), (sources.shard(t, 2) for t in whole[1:])
            output = context_parallel.attention(
                "relu", q, k, v, targets, keys=sources, key_lengths=lengths, move=move
            )
            close(targets.unshard(output, 2), expected)


@check()
def statistics_cover_whole_rows(group: dist.ProcessGroup) -> None:
    sequence = ShardedSequence(13, group)
    whole = make(rows=13, keys=13, requires_grad=True)
    arguments: dict[str, Any] = {"causal": True, "return_stats": True}
    lengths = torch.tensor([13, 4])
    expected = attention("relu", *whole, key_lengths=lengths, **arguments).stats
    shards = [sequence.shard(each.detach(), 2).requires_grad_() for each in whole]
    found = context_parallel.attention(
        "relu", *shards, sequence, key_lengths=lengths, **arguments
    ).stats
    for one, other in zip(found, expected, strict=True):
        close(sequence.unshard(one, 2), other)
    wanted = torch.autograd.grad(expected.row_sum.sum() + expected.entropy.sum(), whole[:2])
    mine = sequence.positions() < 13
    loss = (found.row_sum + found.entropy)[..., mine].sum()
    for grad, want in zip(torch.autograd.grad(loss, shards[:2]), wanted, strict=True):
        close(grad, sequence.shard(want, 2))


@check()
def activation_checkpointing_gathers_keys_again(group: dist.ProcessGroup) -> None:
    sequence = ShardedSequence(13, group)
    shards = [sequence.shard(t, 2).requires_grad_() for t in make(rows=13, keys=13)]
    attend = partial(context_parallel.attention, "relu", sequence=sequence, causal=True)
    outputs = [attend(*shards), checkpoint(attend, *shards, use_reentrant=False)]
    once, again = (torch.autograd.grad(o.square().sum(), shards) for o in outputs)
    for grad, want in zip(again, once, strict=True):
        close(grad, want)


@check()
def ranks_have_equal_flops_and_skip_invisible_blocks(group: dist.ProcessGroup) -> None:
    chunk, width = 4, 8
    sequence = ShardedSequence(2 * chunk * dist.get_world_size(group), group)
    q, k, v = (torch.randn(1, 1, 2 * chunk, width) for _ in range(3))
    for move in MOVES:
        with FlopCounterMode(display=False) as counter:
            context_parallel.attention("relu", q, k, v, sequence, causal=True, move=move)
        blocks = 2 * sequence.ranks + 1
        assert counter.get_total_flops() == blocks * chunk**2 * 2 * 2 * width


# Interpreted kernels are slow, and two ranks have every kind of piece.
@check(sizes=(2,))
def fused_kernels_compute_the_pieces(group: dist.ProcessGroup) -> None:
    sequence = ShardedSequence(11, group)
    shape = {"rows": 11, "keys": 11, "heads": 2, "kv_heads": 1, "width": 16, "value_width": 16}
    whole = make(batch=1, **shape, requires_grad=True)
    lengths = torch.tensor([8])
    # With move="keys" the calls are ordinary ones, whose row normalisation is tested elsewhere.
    normalised = {"power": 4, "row_normalise": 0.1}
    for move, options in (("keys", {}), ("queries", {}), ("queries", normalised)):
        arguments: dict[str, Any] = {"causal": True, "key_lengths": lengths, **options}
        expected = attention("relu", *whole, **arguments)
        wanted = torch.autograd.grad(expected.square().sum(), whole)
        shards = [sequence.shard(each.detach().float(), 2).requires_grad_() for each in whole]
        output = context_parallel.attention(
            "relu", *shards, sequence, move=move, impl="triton", **arguments
        )
        close(sequence.unshard(output, 2), expected.float(), tolerance=1e-5)
        own = output[:, :, sequence.positions() < 11]
        for grad, want in zip(torch.autograd.grad(own.square().sum(), shards), wanted, strict=True):
            close(grad, sequence.shard(want.float(), 2), tolerance=1e-4)


@check()
def sums_over_ranks_are_float32(group: dist.ProcessGroup) -> None:
    ranks = dist.get_world_size(group)
    # 257 is not representable in bfloat16.
    whole = torch.full((2 * ranks, 3), 256.0 if dist.get_rank(group) == 0 else 1.0).bfloat16()
    other = torch.full((2 * ranks, 1), 0.1).requires_grad_()
    whole.requires_grad_()
    sums = scatter_sum([whole, other], 0, group)
    assert all(each.dtype == torch.float32 for each in sums)
    assert sums[0].tolist() == [[255.0 + ranks] * 3] * 2
    # Each gradient keeps the precision of its own dtype.
    (1.001 * sums[0].sum() + 1.001 * sums[1].sum()).backward()
    for each in (whole, other):
        assert torch.equal(each.grad, torch.full_like(each, 1.001))
    alone = scatter_sum([whole], 0, group)
    assert torch.equal(alone[0], sums[0])


@check()
def bfloat16_stays_close_to_float64(group: dist.ProcessGroup) -> None:
    sequence = ShardedSequence(64, group)
    whole = [
        each.bfloat16().double().requires_grad_()
        for each in make(rows=64, keys=64, width=16, value_width=16)
    ]
    for options in ({}, {"power": 4, "row_normalise": 1e-3}):
        arguments: dict[str, Any] = {"causal": True, **options}
        expected = attention("relu", *whole, **arguments)
        wanted = torch.autograd.grad(expected.sum(), whole)
        for move in MOVES:
            shards = [sequence.shard(e.detach().bfloat16(), 2).requires_grad_() for e in whole]
            output = context_parallel.attention("relu", *shards, sequence, move=move, **arguments)
            assert output.dtype == torch.bfloat16
            found = sequence.unshard(output, 2).double()
            assert (found - expected).norm() < 6e-3 * expected.norm()
            for grad, want in zip(torch.autograd.grad(output.sum(), shards), wanted, strict=True):
                assert (sequence.unshard(grad, 2) - want).norm() < 1.2e-2 * want.norm()


@check()
def float16_does_not_overflow(group: dist.ProcessGroup) -> None:
    sequence = ShardedSequence(64, group)
    shards = [torch.full((1, 1, sequence.shard_length, 4), 30.0).half() for _ in range(3)]
    for move in MOVES:
        output = context_parallel.attention("relu_n", *shards, sequence, move=move)
        # 64 scores of 1800 times 30 exceed the range of float16; their mean does not.
        close(output, torch.full_like(output, 54000.0), tolerance=1e-3)
        output = context_parallel.attention(
            "relu", *shards, sequence, move=move, power=4, row_normalise=1e-4
        )
        # Sums of fourth powers overflow too; normalised weights sum to one.
        close(output, torch.full_like(output, 30.0), tolerance=1e-3)


@check()
def row_sums_need_no_further_collective(group: dist.ProcessGroup) -> None:
    sequence = ShardedSequence(13, group)
    shards = [sequence.shard(t, 2).requires_grad_() for t in make(rows=13, keys=13)]
    for move in MOVES:
        sent = []
        for row_normalise in (None, 0.1):
            with (
                mock.patch.object(collectives, "_all_gather", wraps=collectives._all_gather) as a,
                mock.patch.object(
                    collectives, "_reduce_scatter", wraps=collectives._reduce_scatter
                ) as b,
            ):
                context_parallel.attention(
                    "relu", *shards, sequence, causal=True, move=move, row_normalise=row_normalise
                ).sum().backward()
            sent.append((a.call_count, b.call_count))
        assert sent[0] == sent[1] == ((1, 1) if move == "keys" else (2, 2))


# Each rank draws its own dropout mask; a single rank draws the mask of one process.
@check(sizes=(1,))
def dropped_weights_count_in_the_row_sum(group: dist.ProcessGroup) -> None:
    sequence, whole = ShardedSequence(12, group), make(rows=12, keys=12)
    arguments: dict[str, Any] = {"dropout_p": 0.5, "power": 2, "row_normalise": 0.1}
    for move in MOVES:
        found = []
        for attend in (
            attention,
            partial(context_parallel.attention, sequence=sequence, move=move),
        ):
            torch.manual_seed(1)
            found.append(attend("relu", *whole, impl="reference", **arguments))
        close(*found)
