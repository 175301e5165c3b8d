"""Sharded attention on a GPU, with fused kernels and NCCL. `pytest -m gpu`."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from reluformer import attention
from reluformer.context_parallel import ShardedCache, ShardedSequence, sharded_attention
from tests.ops.inputs import make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTH = 1001


@pytest.fixture(scope="module")
def sequence() -> Iterator[ShardedSequence]:
    """A sequence on one rank; NCCL allows one rank per GPU."""
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    yield ShardedSequence(LENGTH)
    dist.destroy_process_group()


def inputs() -> list[torch.Tensor]:
    """q, k and v in float64, rounded to bfloat16."""
    whole = make(rows=LENGTH, keys=LENGTH, heads=8, kv_heads=2, width=64, value_width=64)
    return [each.cuda().bfloat16().double().requires_grad_() for each in whole]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


NORMALISED: dict[str, Any] = {"power": 4, "row_normalise": 1e-2}


@pytest.mark.parametrize("options", [{}, NORMALISED], ids=["plain", "row-normalised"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("move", ["keys", "queries"])
def test_matches_the_reference(
    sequence: ShardedSequence, move: str, causal: bool, options: dict[str, Any]
) -> None:
    whole = inputs()
    gamma = torch.linspace(0.5, 1.5, 8, device="cuda", requires_grad=True)
    lengths = torch.tensor([LENGTH, 613], device="cuda")
    expected = attention("relu", *whole, causal=causal, key_lengths=lengths, gamma=gamma, **options)
    weights = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weights).sum(), [*whole, gamma])
    shards = [sequence.shard(each.detach().bfloat16(), 2).requires_grad_() for each in whole]
    output = sharded_attention.attention(
        "relu",
        *shards,
        sequence,
        causal=causal,
        key_lengths=lengths,
        gamma=gamma,
        move=move,
        impl="triton",
        **options,
    )
    assert error(sequence.unshard(output, 2), expected) < 6e-3
    loss = (output * sequence.shard(weights, 2)).sum()
    found = torch.autograd.grad(loss, [*shards, gamma])
    for grad, want in zip(found[:3], wanted[:3], strict=True):
        assert error(sequence.unshard(grad, 2), want) < 1.2e-2
    assert error(found[3], wanted[3]) < 1.2e-2


@pytest.mark.parametrize("options", [{}, NORMALISED], ids=["plain", "row-normalised"])
def test_decoding_matches_the_reference(sequence: ShardedSequence, options: dict[str, Any]) -> None:
    q, k, v = (each.detach().bfloat16() for each in inputs())
    cache, shards = ShardedCache(), [sequence.shard(each, 2) for each in (k, v)]
    cache.fill(*shards, sequence)
    expected = attention("relu", *(each.double() for each in (q[:, :, -1:], k, v)), **options)
    assert error(cache.attend("relu", q[:, :, -1:], impl="triton", **options), expected) < 6e-3
