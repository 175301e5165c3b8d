"""Identities of softmax and its amendments."""

import pytest
import torch

from reluformer import attention
from reluformer.ops.family import row_normalised
from reluformer.ops.memory import Scores
from tests.ops.inputs import make


def _scores(rows: int = 6, keys: int = 7) -> Scores:
    visible = torch.rand(rows, keys) > 0.3
    visible[:, 0] = True
    values = 2 * torch.randn(rows, keys, dtype=torch.float64)
    return Scores(values.masked_fill(~visible, 0.0), visible, 8)


def test_a_sink_is_softmax_times_a_sigmoid_of_its_log_sum() -> None:
    q, k, v = make(kv_heads=4)
    sink = torch.randn(4, dtype=q.dtype)
    mask = torch.tensor([True, True, False, True, True])
    scores = (q @ k.mT / 8**0.5).masked_fill(~mask, -torch.inf)
    silence = torch.sigmoid(scores.logsumexp(-1, keepdim=True) - sink.view(4, 1, 1))
    expected = attention("softmax", q, k, v, mask=mask) * silence
    torch.testing.assert_close(attention("sink", q, k, v, mask=mask, sink=sink), expected)


def test_a_sink_is_one_more_key_of_value_zero() -> None:
    q, k, v = make(kv_heads=4)
    bias = torch.zeros(3, 6, dtype=q.dtype)
    bias[:, 5] = 0.7
    longer_k, longer_v = (torch.cat([t, torch.zeros_like(t[:, :, :1])], dim=2) for t in (k, v))
    with_key = attention("softmax", q, longer_k, longer_v, bias=bias)
    torch.testing.assert_close(attention("sink", q, k, v, sink=0.7), with_key)


def test_a_sink_far_below_is_softmax_and_far_above_is_silence() -> None:
    q, k, v = make()
    softmax = attention("softmax", q, k, v)
    torch.testing.assert_close(attention("sink", q, k, v, sink=-1e4), softmax)
    torch.testing.assert_close(attention("sink", q, k, v, sink=1e4), torch.zeros_like(softmax))


def test_softmax_ignores_a_shift_of_the_row_and_softmax1_does_not() -> None:
    scores = _scores()
    shifted = Scores(scores.values + 3, scores.visible, 8)
    torch.testing.assert_close(row_normalised.softmax(shifted), row_normalised.softmax(scores))
    assert (
        row_normalised.softmax1(shifted).sum(-1) > row_normalised.softmax1(scores).sum(-1)
    ).all()


def test_cog_is_softmax_where_scores_are_positive_and_odd_in_them() -> None:
    scores = _scores()
    positive = Scores(scores.values.abs(), scores.visible, 8)
    negated = Scores(-scores.values, scores.visible, 8)
    torch.testing.assert_close(row_normalised.cog(positive), row_normalised.softmax(positive))
    torch.testing.assert_close(row_normalised.cog(negated), -row_normalised.cog(scores))
    assert row_normalised.cog(scores).abs().sum(-1).tolist() == pytest.approx([1.0] * 6)


def test_self_adjustment_shrinks_softmax_between_zero_and_one() -> None:
    scores = _scores()
    softmax, adjusted = (
        row_normalised.softmax(scores),
        row_normalised.self_adjust_normalised(scores),
    )
    assert (adjusted >= 0).all() and (adjusted <= softmax + 1e-12).all()
    plain = row_normalised.self_adjust(scores)
    torch.testing.assert_close(plain, softmax * scores.values)
    zeros = Scores(torch.zeros(2, 3), None, 8)
    assert not row_normalised.self_adjust_normalised(zeros).any()


def test_top_k_is_softmax_over_what_it_keeps() -> None:
    q, k, v = make(keys=12)
    for keep in (12, 50):
        torch.testing.assert_close(
            attention("top_k", q, k, v, keep=keep), attention("softmax", q, k, v)
        )
    one = attention("top_k", q, k, v, keep=1, return_weights=True)
    assert ((one.weights == 1).sum(-1) == 1).all()
    three = attention("top_k", q, k, v, keep=3, causal=True, return_weights=True)
    seen = torch.arange(10, 13)
    assert ((three.weights > 0).sum(-1) == seen.clamp_max(3)).all()


def test_top_k_defaults_to_eight_and_rows_with_fewer_keys_keep_all() -> None:
    q, k, v = make(rows=12, keys=12)
    weights = attention("top_k", q, k, v, causal=True, return_weights=True).weights
    assert ((weights > 0).sum(-1) == torch.arange(1, 13).clamp_max(8)).all()


def test_top_k_keeps_keys_that_tie() -> None:
    scores = Scores(torch.tensor([[1.0, 0.0, 1.0, 1.0]]), None, 8)
    third = pytest.approx([1 / 3, 0, 1 / 3, 1 / 3])
    assert row_normalised.top_k(scores, keep=2)[0].tolist() == third


def test_top_k_ignores_hidden_keys_with_large_scores() -> None:
    q, k, v = make()
    k[:, :, 4] = 100 * k[:, :, 4]
    lengths = torch.tensor([4, 4])
    masked = attention("top_k", q, k, v, keep=2, key_lengths=lengths)
    torch.testing.assert_close(masked, attention("top_k", q, k[:, :, :4], v[:, :, :4], keep=2))


def test_assa_spans_from_softmax_to_squared_relu() -> None:
    scores = _scores()
    softmax, squared = row_normalised.softmax(scores), scores.values.relu().square()
    left, right = torch.tensor([50.0, -50.0]), torch.tensor([-50.0, 50.0])
    torch.testing.assert_close(row_normalised.assa(scores, mix=left), softmax)
    torch.testing.assert_close(row_normalised.assa(scores, mix=right), squared)
    torch.testing.assert_close(row_normalised.assa(scores), (softmax + squared) / 2)


def test_lssa_ranks_keys_as_softmax_does_and_lssar_sharpens_it() -> None:
    scores = _scores()
    cosines = Scores(scores.values.tanh(), scores.visible, 64)
    plain, sharp = row_normalised.lssa(cosines), row_normalised.lssar(cosines)
    for found in (plain, sharp):
        shown = found.masked_fill(~scores.visible, 0)
        torch.testing.assert_close(shown.sum(-1), torch.ones(6, dtype=torch.float64))
    assert (sharp.amax(-1) >= plain.amax(-1)).all()
    assert (row_normalised.lssar(cosines, power=15.0).amax(-1) >= sharp.amax(-1) - 1e-12).all()


def test_differential_without_its_second_map_is_softmax_of_the_first_half() -> None:
    q, k, v = make()
    half = attention("differential", q, k, v, lam=0.0, return_weights=True).weights
    first = attention("softmax", q[..., :4], k[..., :4], v, return_weights=True).weights
    torch.testing.assert_close(half, first)
    cancelled = attention(
        "differential", q[..., :4].repeat(1, 1, 1, 2), k[..., :4].repeat(1, 1, 1, 2), v, lam=1.0
    )
    torch.testing.assert_close(cancelled, torch.zeros_like(cancelled), rtol=0, atol=1e-9)
