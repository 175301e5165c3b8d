"""Command line of the training benchmark."""

import argparse
import json
import tempfile
from pathlib import Path

import torch

from benchmarks.training.benchmark import Benchmark
from benchmarks.training.parts import PARTS
from benchmarks.training.processes import run_job


def main(arguments: list[str] | None = None) -> None:
    """Measure, write JSON and print the table."""
    parser = argparse.ArgumentParser(description="Training throughput against Hugging Face.")
    parser.add_argument("--data", type=Path, help="prepared sentences; default: invented text")
    parser.add_argument("--documents", type=Path, help="prepared documents; default: invented text")
    parser.add_argument("--seconds", type=float, default=240.0, help="time limit of the whole run")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--quick", action="store_true", help="tiny models on a CPU")
    names = [part.name for part in PARTS]
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.job is not None:
        run_job(json.loads(chosen.job))
        return
    if not chosen.quick and not torch.cuda.is_available():
        parser.error("torch finds no GPU; --quick runs tiny models on a CPU")
    with tempfile.TemporaryDirectory() as work:
        Benchmark(chosen, Path(work)).run()


if __name__ == "__main__":
    main()
