"""A run killed at any moment, even while it writes a checkpoint, resumes exactly."""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reluformer import checkpoint
from reluformer.train import train
from tests.train.test_loop import assert_same, metrics
from tests.train.tiny import tiny
from tests.train.worker import start

FIELDS = {"steps": 60, "checkpoint_every": 10, "dev_every": 25, "keep": 3}


def kill_when(ready: Callable[[], bool], out: Path, **job: Any) -> None:
    process = start({"out": str(out), "fields": FIELDS, **job})
    deadline = time.monotonic() + 120
    while not ready():
        assert process.is_alive(), "the run ended before it was killed"
        assert time.monotonic() < deadline, "the moment to kill the run never came"
        time.sleep(0.002)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def logged(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def test_killed_three_times(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    # Between checkpoints.
    kill_when(lambda: logged(killed) == 17, killed, stall=("log", 18))
    assert checkpoint.steps(killed)[-1] == 10
    # While a checkpoint is written: tensors on disk, the last file missing.
    unfinished = f"{checkpoint.CHECKPOINTS}/step-00000030.*.partial/optimizer.safetensors"
    kill_when(lambda: any(killed.glob(unfinished)), killed, stall=("checkpoint", 2))
    assert checkpoint.steps(killed)[-1] == 20
    assert any(killed.glob(unfinished))
    # Directly after resuming, when the lines after the checkpoint are gone.
    assert logged(killed) == 31
    kill_when(lambda: logged(killed) == 21, killed, stall=("log", 1))
    train(tiny(**FIELDS), killed, quiet=True)
    train(tiny(**FIELDS), whole, quiet=True)
    assert_same(whole, killed)
    assert [record["step"] for record in metrics(killed)] == list(range(61))
    assert not list(killed.rglob("*.partial"))
    starts = json.loads((killed / "run.json").read_text())["starts"]
    assert [begun["step"] for begun in starts] == [0, 10, 20, 20]
