"""The training benchmark: FLOPs, rates, and parts that run, fail and end independently."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.training import __main__ as command
from benchmarks.training import parts
from benchmarks.training.invented_text import invent
from benchmarks.training.marian import IGNORED, Examples, collate
from benchmarks.training.processes import run_job
from benchmarks.training.rate import Line, describe, forward_flops, rate_of
from reluformer.config.recipe import load_recipe
from reluformer.data.tokenizer import BOS, EOS, PAD
from reluformer.model import AttentionConfig, ModelConfig, ReLUFormer
from reluformer.train.data import load_data
from reluformer.train.run_dir import METRICS


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Invented text, prepared."""
    folder = tmp_path_factory.mktemp("text") / "documents"
    return invent(folder, pairs=200, vocabulary=400, per_document=5)


@pytest.mark.parametrize("kv_heads", [None, 2])
def test_flops_match_the_counter_of_torch(kv_heads: int | None) -> None:
    attention = AttentionConfig(kind="softmax", impl="reference")
    config = ModelConfig(
        vocabulary=70,
        width=24,
        heads=4,
        kv_heads=kv_heads,
        encoder_layers=2,
        decoder_layers=3,
        slots=20,
        attention=attention,
    )
    source, target = torch.randint(4, 70, (2, 11)), torch.randint(4, 70, (2, 7))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        ReLUFormer(config)(source, target)
    # The reference computes both halves of two causal products, which is one product more.
    product = 3 * 2 * 7**2 * 24
    assert counter.get_total_flops() == 2 * (forward_flops(config, 11, 7) + product)


def test_rate_leaves_out_the_first_interval_and_compilation() -> None:
    steps = [(30.0, 100), (1.0, 100), (1.25, 100), (9.0, 100), (1.0, 120), (1.0, 80)]
    lines = [Line(5.0, 0)]
    for seconds, tokens in steps:
        lines.append(Line(lines[-1].seconds + seconds, lines[-1].tokens + tokens))
    rate = rate_of(lines)
    assert rate is not None
    assert rate.tokens_per_second == pytest.approx(90)
    assert (rate.kept, rate.seconds, len(rate.speeds)) == (4, pytest.approx(4.25), 5)
    assert rate_of(lines[:2]) is None


def test_both_libraries_see_the_same_examples(prepared: Path) -> None:
    overrides = [*parts.DOCUMENT, *parts.BARE, *parts.QUICK, f"data.source={prepared}"]
    recipe = load_recipe("document", overrides)
    data = load_data(recipe)
    examples = Examples(data.train)
    ours = next(data.train.batches(recipe).epoch(0))
    theirs = collate([examples[int(index)] for index in ours.examples])
    rows, width = ours.target_out.shape
    assert theirs["labels"].shape[1] % 8 == theirs["input_ids"].shape[1] % 8 == 0
    labels = theirs["labels"].masked_fill(theirs["labels"] == IGNORED, PAD)
    assert torch.equal(labels[:, :width], ours.target_out) and not labels[:, width:].any()
    real = ours.target_in != PAD
    assert torch.equal(theirs["decoder_input_ids"][:, :width][real], ours.target_in[real])
    assert (theirs["decoder_input_ids"][:, 0] == BOS).all()
    assert torch.equal(theirs["attention_mask"].sum(1), ours.source_lengths)
    assert int((theirs["input_ids"] == EOS).sum()) == rows
    assert len(list(examples)) == len(examples)
    step = describe(recipe, data)
    lengths = np.array([len(example["labels"]) for example in examples])
    assert step["target_tokens_per_step"] * len(data.train.batches(recipe).plan(0)) == (
        pytest.approx(lengths.sum(), rel=1e-3)
    )


@pytest.mark.release
def test_parts_end_when_measured_and_fail_independently(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    # A run of this many steps takes minutes, so the benchmark has to stop it.
    monkeypatch.setattr(parts, "QUICK", (*parts.QUICK, "train.steps=100000"))
    monkeypatch.setattr(parts, "ENOUGH_SECONDS", 0.2)
    out = tmp_path / "report.json"
    arguments = ["--quick", "--out", str(out), "--documents", str(prepared)]
    missing = ["--data", str(tmp_path / "missing")]
    command.main([*arguments, *missing, "--parts", "sentence relu", "document relu"])
    report = json.loads(out.read_text())
    assert "missing" in report["parts"]["sentence relu"]["failed"]
    found = report["parts"]["document relu"]
    # The number of kept intervals depends on how evenly the machine runs.
    assert found["tokens_per_second"] > 0 and found["intervals_kept"] >= 1
    assert found["tflops"] * 1e12 == pytest.approx(
        found["tokens_per_second"] * found["flops_per_target_token"]
    )
    assert found["start_up_seconds"] > 0 and found["of_matmul"] > 0
    assert set(report["matmul"]) == {"start", "end"} and report["versions"]["torch"]
    printed = capsys.readouterr().out
    assert "| sentence relu | failed |" in printed and "| document relu | " in printed


def test_marian_trains_and_logs(prepared: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    overrides = [*parts.SENTENCE, *parts.BARE, *parts.QUICK, f"data.source={prepared}"]
    job = {"recipe": "sentence", "overrides": overrides, "out": str(tmp_path), "rows": 3}
    run_job({"library": "transformers", **job})
    lines = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 2, 4, 6, 8, 10, 12]
    tokens = [line["tokens"] for line in lines]
    assert tokens[0] == 0 and all(a < b for a, b in zip(tokens, tokens[1:], strict=False))
    # Rows have at least two target tokens and at most 64.
    assert 12 * 3 * 2 <= tokens[-1] <= 12 * 3 * 64
