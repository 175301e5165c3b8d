"""Diagnostics against their definitions."""

import pytest
import torch

from reluformer import diagnostics
from reluformer.inspection.measure import _attention as head_measures
from reluformer.model import ReLUFormer, ReLUFormerLM
from reluformer.model.losses import attention_losses
from reluformer.model.memory import KeyValueMemory
from reluformer.model.records import AttentionRecord
from reluformer.ops.stats import summarise
from reluformer.train.attention_stats import sum_over_rows
from tests.model.factory import batch, small, tokens


def test_top_share_counts_the_heaviest_slots() -> None:
    weights = torch.tensor([[0.0, 3.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0], [1.0, -5.0, 2.0, 2.0]])
    assert diagnostics.top_share(weights, percent=25).tolist() == pytest.approx([0.75, 0.0, 0.5])
    assert diagnostics.top_share(weights, percent=50).tolist() == pytest.approx([1.0, 0.0, 0.7])
    seen = torch.tensor([3, 3, 2])
    assert diagnostics.top_share(weights, 50, n=seen).tolist() == pytest.approx([1.0, 0.0, 0.5])
    together = diagnostics.top_shares(weights, (25, 50), seen)
    assert together[:, 1].tolist() == pytest.approx([1.0, 0.0, 0.5])
    assert together[:, 0].tolist() == pytest.approx([0.75, 0.0, 0.5])


def test_a_row_whose_sum_underflows_is_dead_for_every_statistic_and_loss() -> None:
    weights = torch.tensor([[0.0, 0.0], [1e-44, 1e-39], [0.25, 0.5], [0.0, 1e-30]]).view(1, 1, 4, 2)
    read = AttentionRecord(
        "encoder", 0, summarise(weights, None), torch.ones(1, 1, 4).bool(), weights
    )
    dead = float(attention_losses([read]).dead_rows)
    assert dead == 0.5
    assert float(sum_over_rows([read])[3]) / 4 == dead
    assert diagnostics._attention_report(read).dead_rows == dead
    tokens = {"source": torch.tensor([[5, 6]]), "source_lengths": torch.tensor([2])}
    values = {"encoder.0": torch.randn(1, 1, 2, 4)}
    measured = head_measures(read, values, tokens, [50])
    assert measured.heads[0].dead_rows == dead
    # The top share is that of the two rows with weight.
    shares = diagnostics._attention_report(read).top_share, measured.top_share[0]
    assert shares == (pytest.approx((2 / 3 + 1) / 2),) * 2


def test_anisotropy_of_known_directions() -> None:
    assert diagnostics.anisotropy(torch.eye(6)) == pytest.approx(0)
    assert diagnostics.anisotropy(torch.ones(5, 3) * torch.rand(5, 1)) == pytest.approx(1)
    vectors = torch.randn(40, 8)
    units = torch.nn.functional.normalize(vectors.double(), dim=-1)
    cosines = (units @ units.T)[~torch.eye(40, dtype=torch.bool)]
    assert diagnostics.anisotropy(vectors) == pytest.approx(float(cosines.mean()))


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_branch_variances_cover_every_branch(norm: str) -> None:
    model = ReLUFormer(small(norm=norm)).train()
    branches = diagnostics.branch_variances(model, batch())
    assert len(branches) == 2 * 2 + 2 * 3
    assert model.training
    assert all(b.branch > 0 and b.ratio == pytest.approx(b.branch / b.residual) for b in branches)
    silent = model.decoder[1].memory.memory
    with torch.no_grad():
        silent.values.zero_()
    ratios = {b.name: b.ratio for b in diagnostics.branch_variances(model, batch())}
    assert ratios["decoder.1.memory"] == 0 and ratios["decoder.0.memory"] > 0


def test_padding_is_excluded() -> None:
    model, inputs = ReLUFormer(small()).double(), batch()
    cut = {name: tensor[1:2] for name, tensor in inputs.items()}
    short = {"source": cut["source"][:, :5], "target": cut["target"][:, :3]}
    for measure in (
        diagnostics.branch_variances,
        diagnostics.attention_reports,
        diagnostics.memory_reports,
    ):
        for padded, bare in zip(measure(model, cut), measure(model, short), strict=True):
            for left, right in zip(padded, bare, strict=True):
                assert left == (right if isinstance(right, (str, int)) else pytest.approx(right))


def test_attention_reports_differ_by_kind() -> None:
    inputs = batch()
    relu = diagnostics.attention_reports(ReLUFormer(small(attention_threshold_init=0.0)), inputs)
    softmax = diagnostics.attention_reports(ReLUFormer(small("softmax")), inputs)
    assert all(r.zeros > 0.1 for r in relu)
    assert all(r.zeros == 0 and r.row_sum == pytest.approx(1) for r in softmax)
    dead = ReLUFormer(small(attention_threshold_init=1e6))
    assert all(
        r.dead_rows == 1 and r.entropy == 0 for r in diagnostics.attention_reports(dead, inputs)
    )


def test_memory_reports_find_dead_slots() -> None:
    model = ReLUFormerLM(small(memory_options={"bias": True}))
    memory = model.decoder[0].memory.memory
    with torch.no_grad():
        memory.get_parameter("keys_bias")[:6] = -1e6
    reports = diagnostics.memory_reports(model, {"tokens": tokens(8, 12)})
    assert reports[0].dead_slots == pytest.approx(6 / 24, abs=0.01)
    assert reports[1].dead_slots < 0.05
    assert reports[0].zeros > reports[1].zeros


@torch.no_grad()
def test_the_top_share_of_a_memory_is_that_of_tokens_that_read() -> None:
    memory = KeyValueMemory(2, 4)
    torch.nn.init.ones_(memory.keys)
    x = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    report = diagnostics._memory_report("memory", memory, x, [50])
    assert (report.top_share, report.top_shares) == (0.25, (0.5,))
    assert diagnostics._memory_report("memory", memory, x[1:], [50]).top_share == 0


def test_maps_are_keyed_by_site_and_layer() -> None:
    maps = diagnostics.attention_maps(ReLUFormer(small()), batch())
    assert sorted(maps) == [(s, i) for s in ("cross", "decoder", "encoder") for i in (0, 1)]
    assert maps["cross", 1].shape == (3, 4, 7, 9)
    assert not maps["cross", 0][1, :, :, 5:].any()
