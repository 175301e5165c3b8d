"""A process that trains a tiny recipe, for tests that kill it or start several.

    python -m tests.train.worker '{"out": "DIR", "fields": {"steps": 9}}'

Fields are those of `tiny`. With `"float64": true` the model computes in double precision. With
`"stall": ["checkpoint", N]` the Nth checkpoint is never finished, and with `"log"` the Nth line of
the metrics is never written.
"""

import json
import multiprocessing
import os
import sys
import time
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from reluformer import checkpoint
from reluformer.train import train
from reluformer.train.metrics import Metrics
from tests.train.tiny import tiny


def main(job: dict[str, Any]) -> None:
    """Train as the job says."""
    torch.set_num_threads(1)
    if job.get("float64"):
        torch.set_default_dtype(torch.float64)
    if "stall" in job:
        stall(*job["stall"])
    train(tiny(**job["fields"]), Path(job["out"]), quiet=True)


def start(job: dict[str, Any], **environment: str) -> BaseProcess:
    """A process of its own for the job; the first one pays for all imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", __name__])
    process = context.Process(target=_run, args=(job, environment), daemon=True)
    process.start()
    return process


def _run(job: dict[str, Any], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    main(job)


def stall(place: str, number: int) -> None:
    """Make the process sleep in call `number` of the function that writes at this place."""
    # The last file of a checkpoint, or a line of the metrics.
    owner: Any = {"checkpoint": checkpoint, "log": Metrics}[place]
    name = {"checkpoint": "write_json", "log": "write"}[place]
    original, calls = getattr(owner, name), count(1)

    def write(*arguments: Any) -> None:
        if next(calls) == number:
            time.sleep(600)
        original(*arguments)

    setattr(owner, name, write)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
