"""The attention layer: parameters, records, sampled statistics and calibration."""

from dataclasses import replace

import pytest
import torch

from reluformer import ATTENTIONS
from reluformer.model import AttentionConfig, ReLUFormer, ReLUFormerLM
from reluformer.model.attention import MultiHeadAttention
from reluformer.model.gamma import Gamma
from reluformer.model.losses import MARGIN, AttentionLosses, attention_losses
from reluformer.model.records import Record
from tests.model.factory import batch, small, tokens


def row_sum(record) -> float:  # type: ignore[no-untyped-def]
    valid = (record.valid & (record.stats.visible > 0)).expand_as(record.stats.row_sum)
    return float(record.stats.row_sum[valid].detach().mean())


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_every_parameter_gets_a_gradient(kind: str) -> None:
    learns = {"attention_gamma": "head", "attention_threshold": "head"} if kind == "relu" else {}
    model = ReLUFormer(small(kind, **learns)).double()
    # Noise, so that no gradient is zero by symmetry.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model(**batch()).logits.square().sum().backward()
    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []


@pytest.mark.parametrize("granularity", ["fixed", "layer", "head"])
@pytest.mark.parametrize("positions", ["sinusoidal", "rotary"])
def test_calibration_sets_the_mean_row_sum(granularity: str, positions: str) -> None:
    config = small(attention_gamma=granularity, attention_row_sum_init=0.6, positions=positions)
    model, inputs = ReLUFormer(config).double(), batch()
    assert abs(row_sum(model(**inputs, record="stats").records[0]) - 0.6) > 0.05
    model.calibrate([inputs])
    for record in model(**inputs, record="stats").records:
        assert row_sum(record) == pytest.approx(0.6, rel=1e-6)


def test_calibration_per_model_balances_the_sites() -> None:
    model, inputs = ReLUFormer(small(attention_gamma="model")).double(), batch()
    assert len({id(m) for m in model.modules() if isinstance(m, Gamma)}) == 1
    model.calibrate([inputs])
    sums = torch.tensor([row_sum(r) for r in model(**inputs, record="stats").records])
    assert sums.min() < 1 < sums.max()


def test_calibration_over_batches_lies_between_them() -> None:
    model = ReLUFormerLM(small(attention_length_exponent=0.5))
    short, long = {"tokens": tokens(4, 5)}, {"tokens": tokens(4, 60)}
    gammas = []
    for batches in ([short], [long], [short, long]):
        model.calibrate(batches)
        gammas.append(float(model.decoder[0].self_attention.attention.gamma().detach()))
    assert gammas[0] < gammas[2] < gammas[1]
    assert gammas[2] == pytest.approx((gammas[0] * gammas[1]) ** 0.5, rel=1e-5)


def test_calibration_does_not_change_other_kinds_and_modes() -> None:
    for config in (small("softmax"), small(attention_row_sum_init=None)):
        model = ReLUFormer(config).train()
        before = {name: t.clone() for name, t in model.state_dict().items()}
        model.calibrate([batch()])
        assert model.training
        assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


def test_a_negative_threshold_makes_keys_active() -> None:
    closed = ReLUFormer(small(attention_threshold_init=0.0)).eval()
    opened = ReLUFormer(small(attention_threshold_init=-5.0)).eval()
    opened.load_state_dict(closed.state_dict() | {
        name: t for name, t in opened.state_dict().items() if "threshold" in name
    })  # fmt: skip
    inputs = batch()
    zeros = [m(**inputs, record="stats").records[0].stats.zeros.mean() for m in (closed, opened)]
    assert zeros[0] > 0.2 and zeros[1] == 0


def test_maps_are_the_weights_of_every_attention() -> None:
    model, inputs = ReLUFormer(small()).eval(), batch()
    output = model(**inputs, record="weights")
    assert [(r.site, r.layer) for r in output.records] == [
        ("encoder", 0),
        ("encoder", 1),
        ("decoder", 0),
        ("cross", 0),
        ("decoder", 1),
        ("cross", 1),
    ]
    for record in output.records:
        assert record.weights is not None
        # Rows are divided by the recorded sum plus `row_normalise`.
        sums = record.stats.row_sum
        torch.testing.assert_close(record.weights.sum(-1), sums / (sums + 1e-4))
    torch.testing.assert_close(output.logits, model(**inputs).logits)


@pytest.mark.parametrize("kind", ["relu", "differential", "rela", "gated"])
def test_sampled_statistics_are_rows_of_the_full_ones(kind: str) -> None:
    model = ReLUFormer(small(kind)).double().eval()
    inputs = batch()
    full = model(**inputs, record="stats").records
    sampled = model(**inputs, record="stats", sample_rows=3).records
    for whole, some in zip(full, sampled, strict=True):
        assert some.stats.row_sum.shape[-1] == 3
        for field in ("row_sum", "entropy", "zeros", "visible"):
            columns = getattr(whole.stats, field).unsqueeze(-1)
            picked = getattr(some.stats, field).unsqueeze(-2)
            assert (columns - picked).abs().amax(dim=(0, 1)).amin(dim=0).max() < 1e-9


@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize("sample_rows", [None, 3])
def test_losses_from_sums_equal_losses_from_statistics(impl: str, sample_rows: int | None) -> None:
    config = small(attention_impl=impl, attention_gamma="head", attention_threshold="head")
    model, inputs = ReLUFormer(config).double(), batch()
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def losses(record: Record) -> tuple[AttentionLosses, tuple[torch.Tensor, ...]]:
        torch.manual_seed(1)
        records = model(**inputs, record=record, sample_rows=sample_rows).records
        assert len(records) == 6
        found = attention_losses(records)
        total = found.normalisation + 3 * found.entropy
        return found, torch.autograd.grad(total, learned, allow_unused=True)

    def from_statistics() -> tuple[AttentionLosses, tuple[torch.Tensor, ...]]:
        # Only the reference computes these.
        with pytest.MonkeyPatch.context() as patch:
            for module in model.modules():
                if isinstance(module, MultiHeadAttention):
                    patch.setattr(module, "config", replace(module.config, impl="reference"))
            return losses("stats")

    expected, gradients = from_statistics()
    assert expected.entropy > 0
    torch.testing.assert_close(losses("entropy"), (expected, gradients))
    without, _ = losses("row_sum")
    torch.testing.assert_close(without.normalisation, expected.normalisation)
    assert without.entropy == 0 and without.dead_rows == expected.dead_rows


@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_the_entropy_loss_is_a_mean_over_sampled_rows(impl: str) -> None:
    model, inputs = ReLUFormer(small(attention_impl=impl)).double(), batch()
    full = model(**inputs, record="entropy").records
    wanted = torch.zeros(()).double()
    for record in full:
        # A block is longer than these sentences, so whole heads and examples are sampled.
        element, head = torch.arange(3).view(3, 1, 1), torch.arange(4).view(4, 1)
        live = record.valid & (record.stats.visible > 0) & (record.stats.row_sum > 0)
        rows = live & ((element + head) % 3 == 0)
        assert 0 < rows.sum() < live.sum()
        excess = (record.stats.entropy - MARGIN * record.stats.visible.log()).clamp_min(0)
        wanted = wanted + excess[rows].mean()
    assert wanted > 0
    found = attention_losses(model(**inputs, record="entropy", entropy_every=3).records)
    torch.testing.assert_close(found.entropy, wanted)
    others = attention_losses(full)
    torch.testing.assert_close(found.normalisation, others.normalisation)
    assert found.dead_rows == others.dead_rows and found.entropy != others.entropy


@pytest.mark.parametrize("sample_rows", [None, 2])
def test_sums_are_recorded_for_regularisable_attentions_only(sample_rows: int | None) -> None:
    config = small(
        encoder_attention=AttentionConfig(kind="rela"),
        cross_attention=AttentionConfig(kind="softmax"),
    )
    model, inputs = ReLUFormer(config), batch()
    for record, sites in (("row_sum", {"decoder"}), ("stats", {"encoder", "decoder", "cross"})):
        output = model(**inputs, record=record, sample_rows=sample_rows)
        assert {record.site for record in output.records} == sites
        torch.testing.assert_close(output.logits, model(**inputs).logits)


def test_sampled_losses_are_unbiased() -> None:
    model = ReLUFormerLM(small()).eval()
    inputs = tokens(4, 12)
    full = attention_losses(model(inputs, record="stats").records)
    draws = [
        attention_losses(model(inputs, record="stats", sample_rows=4).records) for _ in range(300)
    ]
    for field in ("normalisation", "entropy"):
        values = torch.stack([getattr(draw, field) for draw in draws])
        error = values.std() / len(draws) ** 0.5
        # Rows without weight are excluded from the means, which gives a small bias.
        assert abs(values.mean() - getattr(full, field)) < 4 * error + 0.02 * getattr(full, field)


def test_dropout_acts_on_the_weights_in_training_only() -> None:
    config = small()
    attention = MultiHeadAttention(config, AttentionConfig(dropout=0.5))
    x = torch.randn(2, 6, 16)
    assert not torch.equal(attention(x).output, attention(x).output)
    attention.eval()
    assert torch.equal(attention(x).output, attention(x).output)
