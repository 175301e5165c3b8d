"""Context parallelism refuses wrong arguments in one sentence, before it communicates."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from reluformer import ATTENTIONS, ReLUFormerLM, UserError
from reluformer.context_parallel import ShardedCache, ShardedSequence, attention
from tests.model.factory import small, tokens
from tests.ops.inputs import make


@pytest.fixture
def sequence() -> Iterator[ShardedSequence]:
    """Six tokens on a single rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield ShardedSequence(6)
    dist.destroy_process_group()


def test_a_sequence_needs_a_process_group() -> None:
    with pytest.raises(UserError, match="call torch.distributed.init_process_group"):
        ShardedSequence(6)


@pytest.mark.parametrize("name", [name for name, row in ATTENTIONS.items() if row.rule is None])
def test_attentions_without_a_rectified_rule(sequence: ShardedSequence, name: str) -> None:
    q, k, v = make(rows=6, keys=6)
    with pytest.raises(
        UserError, match=f"name must be a rectified attention .*cosine_relu, leaky.*got {name}"
    ):
        attention(name, q, k, v, sequence)
    cache = ShardedCache()
    cache.append(k, v)
    with pytest.raises(UserError, match=f"name must be a rectified attention.*got {name}"):
        cache.attend(name, q)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"move": "values"}, "move must be 'keys' or 'queries', got 'values'"),
        ({"move": "queries", "return_stats": True}, "return_stats must be False with move"),
        ({"move": "queries", "alpha": 1.5}, "relu attention has no option 'alpha'"),
        ({"key_lengths": torch.ones(3, dtype=torch.int64)}, r"key_lengths must be .* shape \[2\]"),
        ({"gamma": torch.ones(3)}, "gamma must be a number or a tensor"),
        ({"power": 5}, "power must be 1, 2, 4 or 8"),
        (
            {"move": "queries", "row_normalise": 0.0},
            "row_normalise must be a finite number above 0, got 0",
        ),
        ({"impl": "sdpa"}, "torch's fused kernels compute softmax only"),
        ({"move": "queries", "impl": "triton"}, "cannot run this relu attention"),
    ],
)
def test_wrong_arguments(
    sequence: ShardedSequence, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        attention("relu", *make(rows=6, keys=6), sequence, **arguments)


def test_tensors_of_the_wrong_length(sequence: ShardedSequence) -> None:
    q, k, v = make(rows=6, keys=8)
    with pytest.raises(UserError, match="k must hold this rank's 6 tokens in dimension 2"):
        attention("relu", q, k, v, sequence)
    with pytest.raises(UserError, match="q must hold this rank's 6 tokens"):
        attention("relu", k, k, k, sequence)
    with pytest.raises(UserError, match="causal must be False if keys is another sequence"):
        attention("relu", q, k, v, sequence, keys=ShardedSequence(8), causal=True)
    with pytest.raises(UserError, match="whole must have the 6 tokens"):
        sequence.shard(k, 2)
    with pytest.raises(UserError, match="shard must hold"):
        sequence.unshard(k, 2)


@pytest.mark.parametrize("length", [0, -1, 2.5])
def test_wrong_sequence_lengths(sequence: ShardedSequence, length: Any) -> None:
    with pytest.raises(UserError, match="length must be an integer of at least 1"):
        ShardedSequence(length)


def test_wrong_use_of_a_cache(sequence: ShardedSequence) -> None:
    q, k, v = make(rows=6, keys=6)
    cache = ShardedCache()
    with pytest.raises(UserError, match="Tq between 1 and the 0 tokens in the cache"):
        cache.attend("relu", q)
    cache.append(k[:, :, :2], v[:, :, :2])
    with pytest.raises(UserError, match=r"Tq between 1 and the 2 tokens.*\[2, 4, 6, 8\]"):
        cache.attend("relu", q)
    with pytest.raises(
        UserError, match="the cache must be empty to be filled, but it holds 2 tokens"
    ):
        cache.fill(k, v, sequence)


def test_models_without_support(sequence: ShardedSequence) -> None:
    text = tokens(1, 6)
    with pytest.raises(
        UserError, match="sequence must be None with cross-attention, a cache, records"
    ):
        ReLUFormerLM(small())(text, sequence=sequence, record="stats")
    with pytest.raises(UserError, match="name must be a rectified attention.*got softmax"):
        ReLUFormerLM(small("softmax"))(text, sequence=sequence)
    with pytest.raises(UserError, match="tokens must hold this rank's 4 tokens"):
        ReLUFormerLM(small())(text, sequence=ShardedSequence(4))
