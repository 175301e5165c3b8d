"""Data parallelism: results agree for any number of processes, replicated or sharded."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import reluformer
from reluformer import checkpoint
from reluformer.train import train
from reluformer.train.data import load_data
from tests.train.test_loop import metrics
from tests.train.tiny import tiny
from tests.train.worker import start

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("data parallel runs")]

ROOT = Path(reluformer.__file__).parents[1]
# The gradient of the normalisation loss is 1 / (row sum): rows with almost no weight amplify the
# rounding of float64 by up to a million within these steps. A wrong count or mean shows at 1e-2.
ROUNDING = 1e-6
# Accumulation, moving average, clipping and both regularisers, but no dropout, because
# its random numbers depend on the rank.
FIELDS: dict[str, Any] = {
    "steps": 8,
    "accumulate": 2,
    "checkpoint_every": 4,
    "dev_every": 4,
    "bleu_every": 8,
    "bleu_examples": 5,
    "ema": 0.9,
    "clip": 0.5,
    "model__dropout": 0.0,
    "model__decoder_layers": 2,
    "model__attention": {"kind": "relu", "gamma": "layer"},
}


def under_torchrun(job: dict[str, Any]) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launch, "-m", "tests.train.worker", json.dumps(job)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def side_by_side(job: dict[str, Any]) -> None:
    """Two processes with what torchrun tells them, but without its own start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    pair = [start(job, RANK=rank, LOCAL_RANK=rank, **place) for rank in ("0", "1")]
    for process in pair:
        process.join()
    assert [process.exitcode for process in pair] == [0, 0]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same recipe alone, on two processes with copies, on two with shards."""
    folder = tmp_path_factory.mktemp("runs")
    for parallel, launch in (("replicate", under_torchrun), ("shard", side_by_side)):
        fields = {**FIELDS, "parallel": parallel}
        launch({"out": str(folder / parallel), "fields": fields, "float64": True})
    train_alone(folder / "alone", **FIELDS)
    return folder


def train_alone(out: Path, **fields: Any) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        train(tiny(**fields), out, quiet=True)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_rank_without_examples_exists_in_these_runs() -> None:
    recipe = tiny(**FIELDS)
    plan = load_data(recipe).train.batches(recipe).plan(0)
    assert (plan.bounds[:16, 1] - plan.bounds[:16, 0]).min() == 1


@pytest.mark.parametrize("parallel", ["replicate", "shard"])
def test_curves_and_weights_agree(runs: Path, parallel: str) -> None:
    alone, together = metrics(runs / "alone"), metrics(runs / parallel)
    assert [r["step"] for r in together] == list(range(9))
    for one, two in zip(alone, together, strict=True):
        assert flat(two) == pytest.approx(flat(one), rel=ROUNDING, abs=1e-9)
    for kind, tensors in checkpoint.load(runs / "alone", 8).tensors.items():
        found = checkpoint.load(runs / parallel, 8).tensors[kind]
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            torch.testing.assert_close(found[name], tensor, rtol=ROUNDING, atol=ROUNDING)


def test_a_run_can_resume_with_another_number_of_processes(runs: Path, tmp_path: Path) -> None:
    # The first half of the steps on two processes with shards, the rest on one.
    source = checkpoint.folder_of(runs / "shard", 4)
    target = checkpoint.folder_of(tmp_path, 4)
    target.parent.mkdir(parents=True)
    source.rename(target)
    for name in ("recipe.yaml", "tokenizer.json", "run.json", "metrics.jsonl"):
        (tmp_path / name).write_bytes((runs / "shard" / name).read_bytes())
    train_alone(tmp_path, **FIELDS)
    for one, two in zip(metrics(runs / "alone"), metrics(tmp_path), strict=True):
        assert flat(two) == pytest.approx(flat(one), rel=ROUNDING, abs=1e-9)


@pytest.mark.parametrize("parallel", ["replicate", "shard"])
def test_every_rank_starts_with_the_weights_of_another_run(
    runs: Path, tmp_path: Path, parallel: str
) -> None:
    fields = {**FIELDS, "steps": 2, "parallel": parallel, "start_from": str(runs / "alone")}
    side_by_side({"out": str(tmp_path / "together"), "fields": fields, "float64": True})
    train_alone(tmp_path / "alone", **fields)
    records = metrics(tmp_path / "alone"), metrics(tmp_path / "together")
    for one, two in zip(*records, strict=True):
        assert flat(two) == pytest.approx(flat(one), rel=ROUNDING, abs=1e-9)


def flat(record: dict[str, Any]) -> dict[str, float]:
    """A record with its nested fields spread out."""
    spread: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, dict):
            spread |= {f"{key}.{inner}": number for inner, number in flat(value).items()}
        else:
            spread[key] = value
    return spread
