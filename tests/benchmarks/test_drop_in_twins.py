"""The benchmark of twins runs, and counts dead rows; its losses need more steps than a test has."""

import json
from pathlib import Path

import pytest
import torch

import reluformer.nn
from benchmarks import drop_in_twins
from tests.nn.timm_import import load_timm


@pytest.mark.slow
@pytest.mark.parametrize("task", drop_in_twins.TASKS)
def test_a_short_run(task: str, tmp_path: Path) -> None:
    load_timm()
    out = tmp_path / "twins.json"
    drop_in_twins.main(["--tasks", task, "--seeds", "1", "--steps", "2", "--out", str(out)])
    result = json.loads(out.read_text())
    softmax, ours = result["rows"]
    assert (softmax["attention"], ours["attention"]) == ("softmax", "normalised_relu")
    # Twins start from the same weights, and the attentions are alike for small scores.
    assert abs(softmax["loss"] - ours["loss"]) < 0.1
    assert [point["step"] for point in ours["curve"]] == [1, 2]
    assert ours["dead_rows"] == 0 and "dead_rows" not in softmax
    (means,) = result["means"]
    assert means["difference"] == pytest.approx(ours["loss"] - softmax["loss"])


def test_dead_rows_are_counted() -> None:
    layer = reluformer.nn.MultiheadAttention(16, 2, batch_first=True)
    with torch.no_grad():
        layer.core.threshold_offset[0] = 1000.0
    x = torch.randn(3, 5, 16)
    padding = torch.tensor([[False] * 5, [False] * 5, [True] * 5])
    with drop_in_twins.counting_dead_rows(layer) as counts:
        layer(x, x, x, key_padding_mask=padding)
    # All rows of the first head, except those that see no key, of 3 x 2 x 5 rows.
    assert counts == [10, 30]
    layer(x, x, x)
    assert counts == [10, 30]
