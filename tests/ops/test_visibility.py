"""Hidden keys never change a row, and n counts its visible keys, for every attention."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from reluformer import ATTENTIONS, attention
from reluformer.ops.hidden import nan_in_bounds, nan_where_seen
from reluformer.ops.visibility import Visibility, count_visible
from tests.ops.inputs import (
    assert_same,
    every_attention,
    every_way,
    gradients,
    make,
    tensor_options,
)


@given(
    rows=st.integers(0, 5),
    keys=st.integers(0, 6),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 4),
    lengths=st.none() | st.tuples(st.integers(-1, 8), st.integers(-1, 8)),
    masked=st.booleans(),
)
def test_a_key_is_visible_when_every_rule_allows_it(
    rows: int,
    keys: int,
    causal: bool,
    window: int | None,
    lengths: tuple[int, int] | None,
    masked: bool,
) -> None:
    mask = torch.rand(2, 3, rows, keys) > 0.4 if masked else None
    key_lengths = None if lengths is None else torch.tensor(lengths)
    rules = Visibility(mask, causal, key_lengths, window)
    table = rules.table(rows, keys, torch.device("cpu"))
    expected = torch.ones(2, 3, rows, keys, dtype=torch.bool)
    for b, h, i, j in itertools.product(range(2), range(3), range(rows), range(keys)):
        position = i + keys - rows
        expected[b, h, i, j] = (
            (not causal or j <= position)
            and (window is None or abs(position - j) < window)
            and (lengths is None or j < lengths[b])
            and (mask is None or bool(mask[b, h, i, j]))
        )
    n = count_visible(table, keys, torch.zeros((), dtype=torch.float64))
    if table is None:
        assert expected.all()
    else:
        assert table.shape[-1] == keys
        assert_same(table.expand_as(expected), expected)
    assert_same(n.expand(2, 3, rows, 1), expected.sum(-1, keepdim=True).double())
    counted = torch.as_tensor(rules.count(rows, keys, torch.device("cpu")))
    assert_same(counted.expand(2, 3, rows), expected.sum(-1))
    if mask is None and table is not None:
        # Without a mask the visible keys of a row are a range, in which `nan_in_bounds` finds NaN.
        values = torch.zeros(2, 3, keys, 2).masked_fill(torch.rand(2, 3, keys, 2) > 0.8, torch.nan)
        bounds = rules.bounds(rows, keys, values.device)
        found = nan_in_bounds(*bounds, values).expand(2, 3, rows, 2)
        assert_same(found.isnan(), nan_where_seen(table, values).expand_as(found).isnan())


def test_causal_is_aligned_to_the_keys_never_to_their_lengths() -> None:
    rules = Visibility(causal=True, key_lengths=torch.tensor([1]))
    table = rules.table(2, 4, torch.device("cpu"))
    assert table is not None
    assert table[0, 0].tolist() == [[True, False, False, False], [True, False, False, False]]


def _shapes() -> list[tuple[int, ...]]:
    """Every shape that broadcasts to [2, 4, 3, 5]."""
    full = (2, 4, 3, 5)
    return [
        tuple(size if keep else 1 for size, keep in zip(full[4 - rank :], kept, strict=True))
        for rank in range(5)
        for kept in itertools.product((False, True), repeat=rank)
    ]


@pytest.mark.parametrize("impl_name", ["relu", "entmax", "ssmax", "tra", "softmax", "sdpa"])
def test_masks_and_biases_of_every_broadcastable_shape(impl_name: str) -> None:
    name, impl = ("softmax", "sdpa") if impl_name == "sdpa" else (impl_name, "reference")
    q, k, v = make()
    for shape in _shapes():
        mask, bias = torch.rand(shape) > 0.4, torch.randn(shape, dtype=q.dtype)
        given = {"mask": mask, "bias": bias}
        full = {option: tensor.expand(2, 4, 3, 5) for option, tensor in given.items()}
        for keys in (["mask"], ["bias"], ["mask", "bias"]):
            some = attention(name, q, k, v, impl=impl, **{o: given[o] for o in keys})
            whole = attention(name, q, k, v, impl="reference", **{o: full[o] for o in keys})
            torch.testing.assert_close(some, whole, msg=lambda text, s=shape: f"{s}: {text}")


def _run(
    name: str, q: Tensor, k: Tensor, v: Tensor, rows: slice = slice(None), **arguments: Any
) -> list[Tensor]:
    """Output of some query rows, and the gradients of q, k, v and the options from these rows."""
    q, k, v = (tensor.detach().clone().requires_grad_() for tensor in (q, k, v))
    options = tensor_options(name, q, v, requires_grad=True)
    output = attention(name, q, k, v, **arguments, **options)[:, :, rows]
    return [output, *gradients(output, [q, k, v, *options.values()])]


@every_way
def test_the_future_moves_nothing(name: str, impl: str) -> None:
    q, k, v = make(rows=6, keys=6)
    past = slice(0, 4)
    before = _run(name, q, k, v, past, causal=True, impl=impl)
    k[:, :, 4:], v[:, :, 4:] = 100.0, -300.0
    after = _run(name, q, k, v, past, causal=True, impl=impl)
    for one, other in zip(before, after, strict=True):
        assert_same(one, other)
    for hidden in before[2:4]:
        assert not hidden[:, :, 4:].any()


@every_way
@pytest.mark.parametrize("by", ["key_lengths", "mask"])
def test_padding_moves_nothing(name: str, impl: str, by: str) -> None:
    q, k, v = make(keys=7)
    lengths = torch.tensor([4, 6])
    visible = torch.arange(7) < lengths[:, None, None, None]
    rules = {"key_lengths": lengths} if by == "key_lengths" else {"mask": visible}
    before = _run(name, q, k, v, **rules, impl=impl)
    padding = ~visible[:, :, 0, :, None]
    k, v = k.masked_fill(padding, 50.0), v.masked_fill(padding, -1e4)
    after = _run(name, q, k, v, **rules, impl=impl)
    for one, other in zip(before, after, strict=True):
        assert_same(one, other)
    for hidden in before[2:4]:
        assert not hidden.masked_select(padding).any()


@every_attention
@pytest.mark.parametrize("content", [math.nan, math.inf])
def test_weights_never_meet_what_hidden_keys_contain(name: str, content: float) -> None:
    q, k, v = make(keys=7)
    mask = torch.tensor([True, False, True, True, False, True, True])
    options = tensor_options(name, q, v, requires_grad=True)
    found = []
    for keys in (k, k.masked_fill(~mask[:, None], content)):
        result = attention(name, q, keys, v, mask=mask, return_weights=True, **options)
        both = torch.cat([result.output.flatten(), result.weights.flatten()])
        found.append([both, *gradients(both, list(options.values()))] if options else [both])
    for one, other in zip(*found, strict=True):
        assert_same(one, other)


@every_way
def test_batch_neighbours_move_nothing(name: str, impl: str) -> None:
    q, k, v = make()
    lengths = torch.tensor([5, 3])
    before = _run(name, q, k, v, key_lengths=lengths, impl=impl)
    q[1], k[1], v[1] = -7.0, 3.0, 1e3
    after = _run(name, q, k, v, key_lengths=torch.tensor([5, 1]), impl=impl)
    for one, other in zip(before[:4], after[:4], strict=True):
        torch.testing.assert_close(one[0], other[0], rtol=1e-13, atol=1e-15)


@every_way
def test_a_row_that_sees_nothing_is_zero_with_zero_gradients(name: str, impl: str) -> None:
    q, k, v = make(rows=4)
    mask = torch.rand(2, 4, 4, 5) > 0.3
    mask[:, :, 2] = False
    blind = _run(name, q, k, v, slice(2, 3), mask=mask, impl=impl)
    for tensor in blind:
        assert_same(tensor, torch.zeros_like(tensor))
    everything = _run(name, q, k, v, mask=mask, impl=impl)
    assert not everything[1][:, :, 2].any()
    for tensor in everything:
        assert tensor.isfinite().all()


@every_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("causal", [False, True])
def test_a_bias_of_minus_infinity_hides_like_a_mask(
    name: str, impl: str, dtype: torch.dtype, causal: bool
) -> None:
    q, k, v = make(rows=4, dtype=dtype)
    mask = torch.tensor([[0, 0, 1, 1, 0], [1, 1, 0, 1, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]) > 0
    finite = torch.linspace(-1, 1, 20, dtype=dtype).view(4, 5)
    bias = finite.masked_fill(~mask, -torch.inf).requires_grad_()
    found = _run(name, q, k, v, bias=bias, causal=causal, impl=impl)
    wanted = _run(name, q, k, v, bias=finite, mask=mask, causal=causal, impl=impl)
    torch.testing.assert_close(found, wanted)
    for tensor in found[:2]:
        assert not tensor[:, :, 2].any()
    output = attention(name, q, k, v, bias=bias, causal=causal, impl=impl)
    (gradient,) = gradients(output, [bias])
    assert gradient.isfinite().all() and not gradient[~mask].any()


@every_attention
def test_weights_and_statistics_follow_a_bias_of_minus_infinity(name: str) -> None:
    q, k, v = make()
    mask = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [0, 1, 0, 0, 0]]) > 0
    bias = torch.zeros(3, 5, dtype=q.dtype).masked_fill(~mask, -torch.inf)
    extras = {"return_weights": True, "return_stats": True, "return_sums": "entropy"}
    found, wanted = (attention(name, q, k, v, **rule, **extras) for rule in (
        {"bias": bias}, {"mask": mask}
    ))  # fmt: skip
    torch.testing.assert_close(found, wanted)
    assert not found.weights[:, :, ~mask].any()


@every_way
@pytest.mark.parametrize("content", [math.nan, math.inf])
def test_keys_behind_a_bias_of_minus_infinity_hold_anything(
    name: str, impl: str, content: float
) -> None:
    q, k, v = make(rows=4)
    bias = torch.tensor([0.0, -math.inf, 0.0, 1.0, -math.inf], dtype=q.dtype)
    is_hidden = bias.isneginf()[:, None]
    before = _run(name, q, k, v, bias=bias, impl=impl)
    k, v = k.masked_fill(is_hidden, content), v.masked_fill(is_hidden, content)
    after = _run(name, q, k, v, bias=bias, impl=impl)
    for one, other in zip(before[:2], after[:2], strict=True):
        assert_same(one, other)
    rows = torch.tensor([0.0, -math.inf, 0.0, 1.0], dtype=q.dtype)[:, None]
    unseen = _run(name, q, k, v, slice(1, 2), bias=bias + rows, impl=impl)
    assert not unseen[0].any()


@every_way
def test_when_every_bias_is_minus_infinity_everything_is_zero(name: str, impl: str) -> None:
    q, k, v = make()
    for shape in ((), (5,), (2, 1, 1, 1)):
        bias = torch.full(shape, -torch.inf, dtype=q.dtype)
        for tensor in _run(name, q, k, v, bias=bias, impl=impl):
            assert_same(tensor, torch.zeros_like(tensor))


@every_way
@pytest.mark.parametrize(
    "rules",
    [
        {"mask": torch.zeros(1, dtype=torch.bool)},
        {"key_lengths": torch.zeros(2, dtype=torch.int32)},
        {"causal": True, "mask": torch.tensor(False)},
    ],
    ids=["mask", "key_lengths", "causal"],
)
def test_when_nothing_is_visible_everything_is_zero(
    name: str, impl: str, rules: dict[str, Any]
) -> None:
    q, k, v = make()
    for tensor in _run(name, q, k, v, **rules, impl=impl):
        assert_same(tensor, torch.zeros_like(tensor))


@every_way
def test_n_is_counted_on_what_is_visible(name: str, impl: str) -> None:
    """The same keys as a shorter tensor, by lengths, by a mask, and scattered among hidden ones."""
    q, k, v = make(batch=1, keys=5)
    short = _run(name, q, k, v, impl=impl)
    pad = torch.full((1, 2, 3, 1), 9.0, dtype=q.dtype)
    long_k = torch.cat([k, pad.expand(-1, -1, -1, 8)], dim=2)
    long_v = torch.cat([v, pad.expand(-1, -1, -1, 6)], dim=2)
    scattered = torch.tensor([0, 2, 3, 5, 7])
    places = torch.full((8,), 5).index_copy(0, scattered, torch.arange(5))
    among = torch.zeros(8, dtype=torch.bool).index_fill(0, scattered, True)
    for keys, values, order, rules in [
        (long_k, long_v, torch.arange(8), {"key_lengths": torch.tensor([5])}),
        (long_k, long_v, torch.arange(8), {"mask": torch.arange(8) < 5}),
        (long_k, long_v, places, {"mask": among}),
    ]:
        found = _run(name, q, keys[:, :, order], values[:, :, order], **rules, impl=impl)
        torch.testing.assert_close(found[:2], short[:2], rtol=1e-11, atol=1e-13)
        kept = scattered if order is places else torch.arange(5)
        for one, other in zip(found[2:4], short[2:4], strict=True):
            torch.testing.assert_close(one[:, :, kept], other, rtol=1e-11, atol=1e-13)


@every_way
@pytest.mark.parametrize("window", [None, 3])
def test_cached_decoding_equals_the_full_square(name: str, impl: str, window: int | None) -> None:
    q, k, v = make(rows=7, keys=7)
    full = attention(name, q, k, v, causal=True, window=window, impl=impl)
    for rows in (1, 3):
        last = attention(name, q[:, :, -rows:], k, v, causal=True, window=window, impl=impl)
        torch.testing.assert_close(last, full[:, :, -rows:], rtol=1e-11, atol=1e-13)
    for length in range(1, 8):
        token = slice(length - 1, length)
        step = attention(
            name,
            q[:, :, token],
            k[:, :, :length],
            v[:, :, :length],
            causal=True,
            window=window,
            impl=impl,
        )
        torch.testing.assert_close(step, full[:, :, token], rtol=1e-11, atol=1e-13)


@every_way
def test_rows_before_the_first_key_see_nothing(name: str, impl: str) -> None:
    """The causal mask is aligned to the end: with more rows than keys, the first see none."""
    q, k, v = make(rows=5, keys=3)
    output = attention(name, q, k, v, causal=True, impl=impl)
    assert not output[:, :, :2].any()
    square = attention(name, q[:, :, 2:], k, v, causal=True, impl=impl)
    torch.testing.assert_close(output[:, :, 2:], square, rtol=1e-11, atol=1e-13)


@every_way
def test_the_order_of_keys_matters_only_where_the_table_says_so(name: str, impl: str) -> None:
    q, k, v = make()
    mask = torch.rand(2, 1, 3, 5) > 0.3
    order = torch.tensor([3, 0, 4, 2, 1])
    straight = attention(name, q, k, v, mask=mask, impl=impl)
    shuffled = attention(name, q, k[:, :, order], v[:, :, order], mask=mask[..., order], impl=impl)
    same = torch.allclose(straight, shuffled, rtol=1e-10, atol=1e-12)
    assert same != ATTENTIONS[name].ordered
