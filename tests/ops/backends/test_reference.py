"""The reference at the edges: precision, layout, extreme and equal scores, and empty tensors."""

from typing import Any

import pytest
import torch
from torch import Tensor

from reluformer import ATTENTIONS, attention, relu_attention
from tests.ops.inputs import WAYS, assert_same, every_attention, every_way, gradients, make
from tests.ops.inputs import tensor_options as options_for
from tests.ops.oracles import ORACLES


@every_attention
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(name: str, dtype: torch.dtype) -> None:
    q, k, v = make(dtype=dtype)
    options = options_for(name, q, v)
    half = attention(name, q, k, v, impl="reference", return_weights=True, **options)
    single = attention(
        name, q.float(), k.float(), v.float(), impl="reference", return_weights=True, **options
    )
    assert half.output.dtype is dtype
    assert_same(half.output, single.output.to(dtype))
    assert_same(half.weights, single.weights)


@every_attention
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_autocast_rounds_the_inputs_only(name: str, dtype: torch.dtype) -> None:
    q, k, v = make(dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = attention(name, q, k, v, causal=True, impl="reference")
    if dtype is torch.float32:
        q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    assert_same(cast, attention(name, q, k, v, causal=True, impl="reference"))


@every_way
def test_strides_do_not_matter(name: str, impl: str) -> None:
    q, k, v = make()
    plain = attention(name, q, k, v, causal=True, impl=impl)
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    v = torch.stack([v, -v], dim=-1)[..., 0]
    assert not any(t.is_contiguous() for t in (q, k, v))
    strided = attention(name, q, k, v, causal=True, impl=impl)
    torch.testing.assert_close(strided, plain, rtol=1e-12, atol=1e-14)


@every_way
def test_query_heads_of_a_group_share_keys_and_values(name: str, impl: str) -> None:
    q, k, v = make(requires_grad=True)
    grouped = attention(name, q, k, v, causal=True, impl=impl)
    own_k, own_v = (t.repeat_interleave(2, dim=1) for t in (k, v))
    alone = attention(name, q, own_k, own_v, causal=True, impl=impl)
    torch.testing.assert_close(grouped, alone, rtol=1e-12, atol=1e-14)
    for one, other in zip(gradients(grouped, [q, k, v]), gradients(alone, [q, k, v]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@every_way
def test_calls_repeat_to_the_last_bit(name: str, impl: str) -> None:
    q, k, v = make(dtype=torch.float32, requires_grad=True)
    first, again = (attention(name, q, k, v, causal=True, impl=impl) for _ in range(2))
    assert_same(again, first)
    for one, other in zip(gradients(first, [q, k, v]), gradients(again, [q, k, v]), strict=True):
        assert_same(one, other)


@every_attention
def test_the_default_scale_is_that_of_the_definition(name: str) -> None:
    q, k, v = make(width=8)
    row = ATTENTIONS[name]
    expected = 1.0 if row.cosine else (4 if row.halves else 8) ** -0.5
    assert row.default_scale(8) == pytest.approx(expected)
    plain = attention(name, q, k, v)
    torch.testing.assert_close(attention(name, q, k, v, scale=expected), plain)
    if row.cosine:
        torch.testing.assert_close(attention(name, 3 * q, 0.2 * k, v), plain)


@every_way
@pytest.mark.parametrize("sign", [-1, 0, 1], ids=["negative", "mixed", "positive"])
def test_scores_of_ten_thousand_stay_finite(name: str, impl: str, sign: int) -> None:
    q, k, v = make(rows=6, keys=6, dtype=torch.float32)
    if sign:
        q, k = q.abs(), sign * k.abs()
    scale = 1e4 if ATTENTIONS[name].cosine else 1e4 / float((q @ k.repeat(1, 2, 1, 1).mT).max())
    q, k = q.requires_grad_(), k.requires_grad_()
    options = options_for(name, q, v, requires_grad=True)
    output = attention(name, q, k, v, causal=True, scale=abs(scale), impl=impl, **options)
    for tensor in (output, *gradients(output, [q, k, *options.values()])):
        assert tensor.isfinite().all()


@every_attention
def test_equal_scores_get_equal_weights(name: str) -> None:
    q, k, v = make(rows=6, keys=6, requires_grad=True)
    same = k[:, :, :1].expand(-1, -1, 6, -1)
    result = attention(name, q, same, v, causal=True, impl="reference", return_weights=True)
    weights = result.weights
    for tensor in gradients(result.output, [q, k, v]):
        assert tensor.isfinite().all()
    if ATTENTIONS[name].ordered:
        return
    for i in range(6):
        seen = weights[:, :, i, : i + 1]
        torch.testing.assert_close(seen, seen[..., :1].expand_as(seen), rtol=1e-9, atol=1e-9)


@every_way
def test_zero_queries_and_keys_stay_finite(name: str, impl: str) -> None:
    q, k, v = (torch.zeros_like(t).requires_grad_() for t in make())
    output = attention(name, q, k, v, causal=True, impl=impl)
    for tensor in (output, *gradients(output, [q, k, v])):
        assert tensor.isfinite().all()


@every_attention
def test_a_single_key_is_a_row_like_any_other(name: str) -> None:
    q, k, v = make(rows=1, keys=1, requires_grad=True)
    result = attention(name, q, k, v, impl="reference", return_weights=True, return_stats=True)
    for tensor in (result.output, *result.stats, *gradients(result.output, [q, k, v])):
        assert tensor.isfinite().all()
    if ORACLES[name].total == 1:
        torch.testing.assert_close(result.weights, torch.ones_like(result.weights))


@every_way
@pytest.mark.parametrize(("batch", "rows", "keys"), [(2, 3, 0), (2, 0, 5), (0, 3, 5)])
def test_empty_tensors(name: str, impl: str, batch: int, rows: int, keys: int) -> None:
    extras = {"return_weights": True, "return_stats": True} if impl == "reference" else {}
    rules: list[dict[str, Any]] = [
        {},
        {"causal": True, "window": 2},
        {"mask": torch.ones(batch, 1, rows, 1, dtype=torch.bool)},
        {"key_lengths": torch.full((batch,), keys)},
    ]
    whole = make()
    q, k, v = whole[0][:batch, :, :rows], *(t[:batch, :, :keys] for t in whole[1:])
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    for given in rules:
        result = attention(name, q, k, v, impl=impl, **given, **extras)
        output = result.output if extras else result
        assert_same(output, torch.zeros(batch, 4, rows, 6, dtype=q.dtype))
        for grad in gradients(output, [q, k, v]):
            assert not grad.any()
        if extras:
            assert result.weights.shape == (batch, 4, rows, keys)
            for field in result.stats:
                assert field.shape == (batch, 4, rows) and not field.any()


@pytest.mark.parametrize(
    ("name", "impl"), [way for way in WAYS if ATTENTIONS[way[0]].output_transform is None]
)
def test_dropout_drops_weights_and_rescales_the_rest(name: str, impl: str) -> None:
    q, k, _ = make(batch=1, rows=40)
    basis = torch.eye(5, dtype=q.dtype).expand(1, 2, 5, 5)
    weights = attention(name, q, k, basis, impl="reference")
    dropped = attention(name, q, k, basis, dropout_p=0.25, impl=impl)
    gone = (dropped == 0) & (weights != 0)
    torch.testing.assert_close(dropped[~gone], weights[~gone] / 0.75)
    live = int((weights != 0).sum())
    # Five standard deviations of a binomial count.
    assert abs(int(gone.sum()) - 0.25 * live) < 5 * (live * 0.25 * 0.75) ** 0.5


def test_dropout_keeps_the_mean_and_leaves_the_returned_weights_alone() -> None:
    q, k, v = make(batch=1, rows=2)
    plain = relu_attention(q, k, v, return_weights=True, return_stats=True)
    many = [t.expand(4000, -1, -1, -1) for t in (q, k, v)]
    noisy = relu_attention(*many, dropout_p=0.3, return_weights=True, return_stats=True)
    assert_same(noisy.weights[7:8], plain.weights)
    assert_same(noisy.stats.row_sum[7:8], plain.stats.row_sum)
    error = noisy.output.std(dim=0) / 4000**0.5
    assert ((noisy.output.mean(dim=0) - plain.output[0]).abs() <= 5 * error).all()


@every_attention
def test_vmap_maps_over_calls(name: str) -> None:
    q, k, v = make(batch=4)
    pairs = [t.view(2, 2, *t.shape[1:]) for t in (q, k, v)]
    mapped = torch.func.vmap(lambda *t: attention(name, *t, causal=True, impl="reference"))(*pairs)
    whole = attention(name, q, k, v, causal=True, impl="reference")
    torch.testing.assert_close(mapped.flatten(0, 1), whole)


@pytest.mark.parametrize("name", ["relu", "tda", "top_k", "softmax"])
def test_calls_compile_as_one_graph(name: str) -> None:
    q, k, v = make(requires_grad=True)
    lengths = torch.tensor([5, 2])

    def run(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        return attention(name, q, k, v, causal=True, key_lengths=lengths)

    backend = "aot_eager" if name == "relu" else "eager"
    compiled = torch.compile(run, fullgraph=True, backend=backend)(q, k, v, lengths)
    eager = run(q, k, v, lengths)
    torch.testing.assert_close(compiled, eager)
    for one, other in zip(gradients(compiled, [q, k, v]), gradients(eager, [q, k, v]), strict=True):
        torch.testing.assert_close(one, other)
