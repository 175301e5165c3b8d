"""Context parallelism refuses wrong arguments in one sentence, before it communicates."""

from collections.abc import Iterator
from typing import Any, cast

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
            "row_normalise must be a finite number of at least 1e-30, got 0",
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
    with pytest.raises(UserError, match=r"dimension 4, got shape \[2, 2, 8, 8\]"):
        sequence.shard(k, 4)
    with pytest.raises(UserError, match="shard must hold .* got NoneType"):
        sequence.unshard(cast(Any, None), 2)


@pytest.mark.parametrize("length", [0, -1, 2.5, True])
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


@pytest.mark.parametrize("is_filled", [False, True])
def test_tokens_that_do_not_fit_a_cache(sequence: ShardedSequence, is_filled: bool) -> None:
    q, k, v = make(rows=1, keys=6)
    cache = ShardedCache()
    if is_filled:
        cache.append(k, v)
    wrong: list[tuple[Any, Any, str]] = [
        (None, v, "k must be a tensor, got NoneType"),
        (k, v.tolist(), "v must be a tensor, got list"),
        (k[0], v[0], r"k must have shape \[B, Hkv, T, D\], got \[2, 6, 8\]"),
        (k, v[0], r"v must have shape \[B, Hkv, T, D\], got \[2, 6, 6\]"),
        (k, v[:, :, 1:], r"v must be .* of shape \[2, 2, 6, 6\], got .* \[2, 2, 5, 6\]"),
        (k, v[:1], r"v must be .* of shape \[2, 2, 6, 6\], got .* \[1, 2, 6, 6\]"),
        (k, v.float(), "v must be torch.float64 of shape .* got torch.float32"),
        (k, v.to("meta"), "v must be on cpu as (k|the cache) is, got a tensor on meta"),
        (k.to_sparse(), v, "k must be a dense tensor"),
        (k.int(), v.int(), "k must be (torch.float64|a floating-point tensor).* got torch.int32"),
    ]
    for keys, values, message in wrong:
        with pytest.raises(UserError, match=message):
            cache.append(keys, values)
        if not is_filled:
            with pytest.raises(UserError, match=message):
                cache.fill(keys, values, sequence)
        assert cache.length == 6 * is_filled
    cache.append(k, v)
    assert cache.attend("relu", q).isfinite().all()


def test_tokens_that_do_not_fit_the_earlier_ones(sequence: ShardedSequence) -> None:
    q, k, v = make(rows=1, keys=6)
    cache = ShardedCache()
    cache.fill(k, v, sequence)
    for keys, values in (
        (k[:1], v[:1]),
        (k[:, :1], v[:, :1]),
        (k[..., :4], v),
        (k, v[..., :4]),
        (k.float(), v.float()),
        (k.to("meta"), v.to("meta")),
    ):
        with pytest.raises(UserError, match=r"must be (torch.float64 of shape|on cpu)"):
            cache.append(keys, values)
    with torch.autocast("cpu", torch.bfloat16):
        # Under autocast new tokens take the dtype of the cache.
        cache.append(k.bfloat16(), v.bfloat16())
    assert cache.length == 12
    for wrong, message in (
        (None, "q must be a tensor, got NoneType"),
        (q[0], r"q must be \[B, H, Tq, D\]"),
        (q[0, 0], r"q must be \[B, H, Tq, D\]"),
        (torch.tensor(1.0), r"q must be \[B, H, Tq, D\]"),
        (q.to("meta"), "q must be on cpu as the cache is"),
        (q[:, :0], "q's heads must be a multiple of k's heads, got 0 and 2"),
    ):
        with pytest.raises(UserError, match=message):
            cache.attend("relu", wrong)


def test_wrong_groups_and_sequences(sequence: ShardedSequence) -> None:
    for group in ("ranks", 3):
        with pytest.raises(UserError, match="group must be a process group that this process"):
            ShardedCache(cast(Any, group))
    q, k, v = make(rows=6, keys=6)
    for wrong in (None, 6):
        with pytest.raises(UserError, match="sequence must be a ShardedSequence, got"):
            ShardedCache().fill(k, v, cast(Any, wrong))
        with pytest.raises(UserError, match="sequence must be a ShardedSequence, got"):
            attention("relu", q, k, v, cast(Any, wrong))
    with pytest.raises(UserError, match="keys must be a ShardedSequence, got int"):
        attention("relu", q, k, v, sequence, keys=cast(Any, 6))


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
