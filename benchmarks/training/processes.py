"""A part in its own process, and its log while it is written."""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.training.marian import train_marian
from benchmarks.training.rate import Line
from reluformer.config.recipe import load_recipe
from reluformer.files import write_json
from reluformer.train import train

ROOT = Path(__file__).resolve().parents[2]


def run_job(job: dict[str, Any]) -> None:
    """Run a job in this process: a matrix product, or a training run."""
    out = Path(job["out"])
    if job["library"] == "matmul":
        write_json(out, matmul_rate(job["quick"]))
        return
    recipe = load_recipe(job["recipe"], job["overrides"])
    if job["library"] == "reluformer":
        train(recipe, out, quiet=True)
    else:
        train_marian(recipe, out, job["rows"])


@contextmanager
def process(job: dict[str, Any], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a job in a process that is killed, with its children, at the end of the block."""
    command = [sys.executable, "-m", "benchmarks.training", "--job", json.dumps(job)]
    # The Trainer would use all visible GPUs.
    environment = {"CUDA_VISIBLE_DEVICES": "0", **os.environ, "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as output:
        started = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, cwd=ROOT, start_new_session=True
        )
        try:
            yield started
        finally:
            # Processes of its group may outlive it.
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
            started.wait()


def follow(
    running: subprocess.Popen[bytes], log: Path, until: float, done: Callable[[list[Line]], bool]
) -> list[Line]:
    """Read a log while it is written, until the process ends, `done` is true or time is up."""
    lines: list[Line] = []
    position = 0
    while True:
        ended = running.poll() is not None
        now = time.perf_counter()
        if log.is_file() and log.stat().st_size > position:
            with log.open("rb") as file:
                file.seek(position)
                whole, _, _ = file.read().rpartition(b"\n")
            if whole:
                position += len(whole) + 1
                # Several new lines count as one, because their times are not known.
                lines.append(Line(now, json.loads(whole.splitlines()[-1]).get("tokens", 0)))
        if ended or now > until or done(lines):
            return lines
        time.sleep(0.003)


def check_status(running: subprocess.Popen[bytes], log: Path) -> None:
    """Raise RuntimeError with the end of the log if the process has failed."""
    if running.poll():
        tail = log.read_text(errors="replace").strip().splitlines()[-15:]
        raise RuntimeError("\n".join([f"exit status {running.returncode}", *tail]))


def matmul_rate(quick: bool) -> dict[str, Any]:
    """TFLOP/s of a large matrix product, and its device."""
    size, device = (64, "cpu") if quick else (8192, "cuda")
    dtype = torch.float32 if quick else torch.bfloat16
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    rounds = []
    for _ in range(8):
        started = time.perf_counter()
        for _ in range(20):
            a @ b
        if not quick:
            torch.cuda.synchronize()
        rounds.append(20 * 2 * size**3 / (time.perf_counter() - started) / 1e12)
    # The first rounds warm up.
    result = {"tflops": statistics.median(rounds[3:]), "size": size}
    if quick:
        return result
    properties = torch.cuda.get_device_properties(0)
    memory = round(properties.total_memory / 2**30, 1)
    return {**result, "device": properties.name, "gib": memory, "cuda": torch.version.cuda}
