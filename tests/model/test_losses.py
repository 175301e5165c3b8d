"""Losses against their formulas."""

import math

import pytest
import torch

from reluformer import attention
from reluformer.model.losses import (
    attention_losses,
    attention_sums,
    mean_losses,
    translation_loss,
)
from reluformer.model.records import AttentionRecord
from reluformer.ops import RowSums, Stats


def record(scale: float = 1.0, lengths: tuple[int, ...] = (5, 3)) -> AttentionRecord:
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 5, 4, dtype=torch.float64), torch.randn(2, 3, 5, 4).double()
    result = attention("relu", q * scale, k, k, causal=True, return_stats=True)
    assert result.stats is not None
    valid = torch.arange(5) < torch.tensor(lengths).view(-1, 1, 1)
    return AttentionRecord("decoder", 0, result.stats, valid, None)


def test_translation_loss_skips_padding_and_smooths() -> None:
    logits, target = torch.randn(2, 3, 7).double(), torch.tensor([[3, 4, 0], [5, 0, 0]])
    log_p = logits.log_softmax(-1)
    nll = -(log_p[0, 0, 3] + log_p[0, 1, 4] + log_p[1, 0, 5])
    uniform = -(log_p[0, 0] + log_p[0, 1] + log_p[1, 0]).mean()
    smooth, plain = translation_loss(logits, target, pad_id=0, smoothing=0.1)
    torch.testing.assert_close(plain, nll)
    torch.testing.assert_close(smooth, 0.9 * nll + 0.1 * uniform)
    torch.testing.assert_close(translation_loss(logits, target, pad_id=0)[0], nll)


def test_regularisers_are_means_over_live_rows() -> None:
    one = record()
    normalisation, entropy, live, dead = 0.0, 0.0, 0, 0
    for b, length in enumerate((5, 3)):
        for h in range(3):
            for i in range(length):
                total = float(one.stats.row_sum[b, h, i])
                if total == 0:
                    dead += 1
                    continue
                live += 1
                normalisation += abs(math.log(total))
                cap = 0.7 * math.log(i + 1)
                entropy += max(float(one.stats.entropy[b, h, i]) - cap, 0)
    losses = attention_losses([one, one])
    assert dead > 0
    assert float(losses.normalisation) == pytest.approx(2 * normalisation / live)
    assert float(losses.entropy) == pytest.approx(2 * entropy / live)
    assert float(losses.dead_rows) == pytest.approx(dead / (dead + live))


def test_dead_rows_leave_no_nan() -> None:
    """All scores negative: nothing is live, the losses are zero and so are the gradients."""
    q = torch.ones(1, 1, 3, 2, requires_grad=True)
    result = attention(
        "relu", q, -torch.ones(1, 1, 4, 2), torch.ones(1, 1, 4, 2), return_stats=True
    )
    assert result.stats is not None
    losses = attention_losses(
        [AttentionRecord("cross", 0, result.stats, torch.ones(1, 1, 3).bool(), None)]
    )
    assert losses.normalisation == 0 and losses.entropy == 0 and losses.dead_rows == 1
    (losses.normalisation + losses.entropy).backward()
    assert q.grad is not None and not q.grad.any()


def test_losses_of_parts_add_up_to_the_whole() -> None:
    """Split over processes and divided by the counts of all, the parts sum to the one loss."""
    whole = record()
    halves = [
        whole._replace(
            stats=type(whole.stats)(*(field[b : b + 1] for field in whole.stats)),
            valid=whole.valid[b : b + 1],
        )
        for b in range(2)
    ]
    sums = [attention_sums([half]) for half in halves]
    together = type(sums[0])(*(a + b for a, b in zip(*sums, strict=True)))
    parts = [mean_losses(part, together) for part in sums]
    expected = attention_losses([whole])
    for field in ("normalisation", "entropy", "dead_rows"):
        total = sum(getattr(part, field) for part in parts)
        torch.testing.assert_close(total, getattr(expected, field))


def test_row_sums_that_underflow_leave_gradients_finite() -> None:
    row_sum = torch.tensor([1e-44, 1e-39, 0.5]).view(1, 1, 3).requires_grad_()
    sums = RowSums(row_sum, None, torch.ones(1, 1, 3))
    losses = attention_losses(
        [AttentionRecord("decoder", 0, sums, torch.ones(1, 1, 3).bool(), None)]
    )
    losses.normalisation.backward()
    assert row_sum.grad is not None
    torch.testing.assert_close(row_sum.grad, torch.tensor([[[0.0, 0.0, -2.0]]]))
    assert losses.dead_rows == pytest.approx(2 / 3)


def test_normalisation_pulls_row_sums_to_one() -> None:
    q = torch.randn(2, 2, 6, 8, requires_grad=True)
    k, v = torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    optimiser = torch.optim.Adam([q], lr=0.05)
    for _ in range(200):
        result = attention("relu", q, k, v, return_stats=True)
        assert result.stats is not None
        read = AttentionRecord("encoder", 0, result.stats, torch.ones(1, 1, 6).bool(), None)
        optimiser.zero_grad()
        attention_losses([read]).normalisation.backward()
        optimiser.step()
    live = result.stats.row_sum[result.stats.row_sum > 0]
    assert (live - 1).abs().median() < 0.05


def test_sums_keep_the_order_of_records_of_different_shapes() -> None:
    """Readings that are alike are added up at once: long, short, with and without entropies."""
    whole = record()
    stats = whole.stats
    sums = RowSums(stats.row_sum, None, stats.visible)
    sampled = torch.arange(5) < 2
    some = RowSums(stats.row_sum, stats.entropy, stats.visible, sampled.expand_as(stats.row_sum))
    short = Stats(*(each[..., :3] for each in stats))
    kinds = [
        whole,
        whole._replace(stats=short, valid=whole.valid[..., :3]),
        whole._replace(stats=sums, valid=torch.ones(1, 1, 1, dtype=torch.bool)),
        whole._replace(stats=some),
        record(2.0, (2, 4)),
    ]
    together = attention_sums([*kinds, *reversed(kinds)])
    apart = [attention_sums([each]) for each in kinds]
    for column, *alone in zip(together, *apart, strict=True):
        torch.testing.assert_close(column, torch.cat([*alone, *reversed(alone)]))
    assert len({float(each) for each in together.normalisation}) == 4
    assert len({int(each) for each in together.sampled}) >= 4
