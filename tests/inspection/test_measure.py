"""Measures per head against their definitions."""

import json
import math
from pathlib import Path

import pytest
import torch

from reluformer import diagnostics
from reluformer.inspection.measure import inspect_model
from reluformer.inspection.show import plot_inspection, print_inspection
from reluformer.model import ReLUFormer
from tests.model.factory import batch, small


@pytest.mark.parametrize("kind", ["relu", "softmax", "cog"])
def test_heads_average_to_the_reports_of_the_layers(kind: str) -> None:
    model, inputs = ReLUFormer(small(kind)).train(), batch()
    result = inspect_model(model, inputs, (0.2, 10, 100))
    assert model.training
    reports = diagnostics.attention_reports(model, inputs)
    assert len(result.attentions) == len(reports) == 6
    for measured, report in zip(result.attentions, reports, strict=True):
        assert (measured.site, measured.layer) == (report.site, report.layer)
        for name in ("row_sum", "entropy", "zeros", "dead_rows", "max"):
            assert measured.mean(name) == pytest.approx(getattr(report, name), abs=1e-6)
        assert measured.top_share[0] == pytest.approx(report.top_share, abs=1e-6)
        assert measured.top_share[2] == pytest.approx(1)
    assert [b.name for b in result.branches] == [
        b.name for b in diagnostics.branch_variances(model, inputs)
    ]
    assert json.loads(json.dumps(result.to_dict()))["percents"] == [0.2, 10, 100]


def test_anisotropy_is_of_the_values_that_heads_read() -> None:
    model, inputs = ReLUFormer(small()).eval(), batch()
    layer = model.encoder[0].self_attention.attention
    half = layer.key_value.out_features // 2
    with torch.no_grad():
        layer.key_value.weight[half:] = 0
        layer.key_value.bias[half:] = 1
    result = inspect_model(model, inputs)
    first = next(a for a in result.attentions if (a.site, a.layer) == ("encoder", 0))
    assert all(head.anisotropy == pytest.approx(1) for head in first.heads)
    assert result.attentions[1].heads[0].anisotropy < 0.9


def test_keys_that_no_query_reads_are_dead() -> None:
    model = ReLUFormer(small(attention_threshold_init=1e6)).eval()
    for attention in inspect_model(model, batch()).attentions:
        assert all(head.dead_slots == head.dead_rows == 1 for head in attention.heads)
    softmax = inspect_model(ReLUFormer(small("softmax")), batch())
    assert all(head.dead_slots == 0 for a in softmax.attentions for head in a.heads)


def test_persistent_slots_are_keys_before_the_tokens() -> None:
    model, inputs = ReLUFormer(small("softmax", memory="persistent")).eval(), batch()
    attention = model.encoder[0].self_attention.attention
    assert attention.persistent is not None
    with torch.no_grad():
        for vectors in (attention.persistent.values, attention.key_value.bias):
            vectors.fill_(1)
        attention.key_value.weight.zero_()
    result = inspect_model(model, inputs)
    # Learned values and those of the tokens point in one direction.
    assert all(h.anisotropy == pytest.approx(1) for h in result.attentions[0].heads)
    assert all(h.dead_slots == 0 for a in result.attentions for h in a.heads)


def test_tables_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = inspect_model(ReLUFormer(small()), batch())
    assert not any(math.isnan(branch.ratio) for branch in result.branches)
    print_inspection(result)
    text = capsys.readouterr().out
    assert "top 0.2 %: share of the weight" in text and "encoder.0" in text
    assert [path.name for path in plot_inspection(result, tmp_path)] == [
        "variance-ratio.svg",
        "top-share.svg",
        "heads.svg",
    ]
